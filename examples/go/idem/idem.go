// Package idem runs work once per idempotency key, with the PostgreSQL extension idem and pgx.
//
// Once: the work is in the database. Key, work and result commit in one transaction.
// Leased: the work leaves the database (a mail, a card). A lease keeps others out, a token keeps a late worker out.
//
// The package needs no session state and no prepared statements. Behind pgbouncer in transaction mode, set
// config.ConnConfig.PreferSimpleProtocol = true before pgxpool.ConnectConfig: by default pgx prepares statements.
package idem

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"time"

	"github.com/jackc/pgconn"
	"github.com/jackc/pgx/v4"
	"github.com/jackc/pgx/v4/pgxpool"
)

var (
	ErrMismatch  = errors.New("the key was used with another request")                     // ID001
	ErrStale     = errors.New("another worker has taken over")                             // ID003: nothing was stored
	ErrUndecided = errors.New("the key is parked or exhausted: an operator has to decide") // see doc/outside.md
	errFinished  = errors.New("the key is finished")                                       // ID004
)

// Busy: another request with this key runs now. Ask again later.
type Busy struct{ RetryAfter time.Duration }

func (b *Busy) Error() string { return "another request with this key is being processed" }

// Refusal as the error of the work: its changes are rolled back, and Result is stored like any other.
type Refusal struct{ Result any }

func (r *Refusal) Error() string { return "refused" }

// NotDone as the error of the call of Leased says that nothing has happened outside: the lease is released at once.
type NotDone struct{ Err error }

func (n *NotDone) Error() string { return "not done: " + n.Err.Error() }
func (n *NotDone) Unwrap() error { return n.Err }

// Key names the work. Request is compared with the one of the first claim. Zero values mean: the defaults of idem,
// and no waiting. (A request that waits keeps a connection of the pool.)
type Key struct {
	Key, Scope string
	Request    any
	TTL, Wait  time.Duration
}

// Tx is the transaction of the key. It has no Commit, Rollback and Begin: they belong to this package.
type Tx interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// Once runs fn in the transaction that claims the key, or returns the stored result with replayed = true. If the
// connection is lost, fn runs again, unless the key says that the transaction has committed.
func Once[T any](ctx context.Context, pool *pgxpool.Pool, key Key, fn func(tx Tx) (T, error)) (result T, replayed bool, err error) {
	request, err := toJSON(key.Request)
	if err != nil {
		return result, false, err
	}
	err = again(ctx, pool, func(conn *pgxpool.Conn) error {
		var row claim
		// One round trip. The savepoint comes after the claim, so that a refusal can be stored.
		err := roundTrip(ctx, conn, query{sql: "BEGIN"}, query{
			"SELECT claimed, status, result::text, NULL::bigint, NULL::int, NULL::text, NULL::bigint" +
				" FROM idem_claim($1, request => $2::jsonb, ttl => $3::interval, wait => $4::interval, scope => $5)",
			[]any{key.Key, request, orNull(key.TTL), interval(key.Wait), orNull(key.Scope)},
			row.scan,
		}, query{sql: "SAVEPOINT idem_work"})
		if err != nil {
			return meaning(err)
		}
		if replayed = !row.claimed; replayed {
			return row.replay(&result)
		}
		value, err := fn(conn)
		stored, refusal := any(value), (*Refusal)(nil)
		if errors.As(err, &refusal) {
			stored = refusal.Result
			_, err = conn.Exec(ctx, "ROLLBACK TO SAVEPOINT idem_work")
		}
		if err != nil {
			return err // of the work: whatever its SQLSTATE is, it has no meaning here
		}
		return finish(ctx, conn, stored, &result, "SELECT idem_finish($1, scope => $2, result => $3::jsonb)", key.Key, orNull(key.Scope))
	})
	return result, replayed, err
}

// A Lease is what the call of Leased gets. The context of the call ends when another worker has taken over.
type Lease struct {
	Token      int64
	Attempt    int
	Checkpoint *string // what idem_checkpoint has stored in the attempt before
}

// Leased runs call outside of any transaction, then record in the transaction that finishes the key. The lease is
// renewed while call runs. The call may happen twice, so pass the key on to the other side.
func Leased[C, T any](ctx context.Context, pool *pgxpool.Pool, key Key, lease time.Duration,
	call func(ctx context.Context, l Lease) (C, error), record func(tx Tx, outcome C) (T, error)) (result T, replayed bool, err error) {
	request, err := toJSON(key.Request)
	if err != nil {
		return result, false, err
	}
	// The name is new for each call: two calls with the same name would share the lease. If the answer is lost, the
	// second try gets the same lease again.
	host, _ := os.Hostname()
	worker := fmt.Sprintf("%s:%d:%x", host, os.Getpid(), randomInt(math.MaxInt64))
	var row claim
	err = ask(ctx, pool, row.scan, "SELECT claimed, status, result::text, token, attempt, checkpoint::text,"+
		" ceil(extract(epoch FROM lease_until - clock_timestamp()))::bigint"+
		" FROM idem_lease($1, $2::interval, request => $3::jsonb, ttl => $4::interval, worker => $5, scope => $6)",
		key.Key, interval(lease), request, orNull(key.TTL), worker, orNull(key.Scope))
	if err != nil {
		return result, false, err
	}
	if !row.claimed {
		return result, true, row.replay(&result)
	}
	fenced := func(work func(tx Tx) (any, error)) error {
		err := again(ctx, pool, func(conn *pgxpool.Conn) error {
			err := roundTrip(ctx, conn, query{sql: "BEGIN"},
				query{sql: "SELECT idem_fence($1, $2, $3)", args: []any{key.Key, *row.token, orNull(key.Scope)}})
			if err != nil {
				return meaning(err)
			}
			stored, err := work(conn)
			if err != nil {
				return err
			}
			return finish(ctx, conn, stored, &result, "SELECT idem_finish($1, token => $2, scope => $3, result => $4::jsonb)",
				key.Key, *row.token, orNull(key.Scope))
		})
		if errors.Is(err, errFinished) { // our COMMIT happened, its answer was lost
			err = ask(ctx, pool, row.scan, "SELECT false, status, result::text, NULL::bigint, NULL::int, NULL::text, NULL::bigint"+
				" FROM idem_get($1, $2)", key.Key, orNull(key.Scope))
			if err == nil {
				err = row.replay(&result)
			}
		}
		return err
	}
	// The renewal ends before the fence: a renewal from another session would wait for the fence.
	working, stop := heartbeat(ctx, lease/3, func() error {
		return ask(ctx, pool, nil, "SELECT idem_renew($1, $2, $3::interval, $4)", key.Key, *row.token, interval(lease), orNull(key.Scope))
	})
	var lost error
	outcome, err := func() (C, error) {
		defer func() { lost = stop() }() // also after a panic: nobody may renew the lease for ever
		return call(working, Lease{*row.token, *row.attempt, row.checkpoint})
	}()
	if lost != nil {
		return result, false, lost
	}
	if err == nil {
		err = fenced(func(tx Tx) (any, error) { return record(tx, outcome) })
	}
	if refusal := (*Refusal)(nil); errors.As(err, &refusal) {
		err = fenced(func(Tx) (any, error) { return refusal.Result, nil })
	}
	if notDone := (*NotDone)(nil); errors.As(err, &notDone) {
		_ = ask(ctx, pool, nil, "SELECT idem_release($1, $2, $3)", key.Key, *row.token, orNull(key.Scope))
	}
	return result, false, err // another error leaves the outcome open: the lease expires, and the next caller tries again
}
