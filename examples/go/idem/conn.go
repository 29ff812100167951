package idem

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"time"

	"github.com/jackc/pgconn"
	"github.com/jackc/pgx/v4"
	"github.com/jackc/pgx/v4/pgxpool"
)

// meaning translates errors of the functions of idem, and only those: an error of the work stays what it is.
func meaning(err error) error {
	switch code(err) {
	case "ID001":
		return ErrMismatch
	case "ID003":
		return ErrStale
	case "ID004":
		return errFinished
	}
	return err
}

func code(err error) string {
	if pg := (*pgconn.PgError)(nil); errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// again calls work with a connection, once more if the connection was lost or the server asks for it (40001, 40P01).
// A COMMIT without an answer may have happened. The key knows, and the work asks it first, each time.
func again(ctx context.Context, pool *pgxpool.Pool, work func(conn *pgxpool.Conn) error) error {
	for n := 1; ; n++ {
		lost, err := try(ctx, pool, work)
		if err == nil || n == 8 || !lost && code(err) != "40001" && code(err) != "40P01" {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(jitter(min(2*time.Second, 50*time.Millisecond<<n))):
		}
		if lost { // the others may be lost, too
			for _, conn := range pool.AcquireAllIdle(ctx) {
				_ = conn.Conn().Ping(ctx)
				conn.Release()
			}
		}
	}
}

func try(ctx context.Context, pool *pgxpool.Pool, work func(conn *pgxpool.Conn) error) (lost bool, err error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return true, err
	}
	defer conn.Release() // also after a panic: the pool closes a connection that is in a transaction
	err = work(conn)
	if !conn.Conn().IsClosed() && conn.Conn().PgConn().TxStatus() != 'I' {
		_, _ = conn.Exec(ctx, "ROLLBACK")
	}
	return conn.Conn().IsClosed(), err
}

type query struct {
	sql  string
	args []any
	scan func(pgx.Row) error
}

// roundTrip sends all queries at once.
func roundTrip(ctx context.Context, conn *pgxpool.Conn, queries ...query) error {
	batch := &pgx.Batch{}
	for _, q := range queries {
		batch.Queue(q.sql, q.args...)
	}
	results := conn.SendBatch(ctx, batch)
	defer results.Close()
	for _, q := range queries {
		if q.scan != nil {
			if err := q.scan(results.QueryRow()); err != nil {
				return err
			}
			continue
		}
		tag, err := results.Exec()
		if err != nil {
			return err
		}
		// COMMIT of a transaction that has failed answers ROLLBACK, and that is no error: look at the tag.
		if q.sql == "COMMIT" && tag.String() != "COMMIT" {
			return errors.New("the transaction was rolled back at its COMMIT")
		}
	}
	return results.Close()
}

// ask calls one function of idem in autocommit.
func ask(ctx context.Context, pool *pgxpool.Pool, scan func(pgx.Row) error, sql string, args ...any) error {
	return again(ctx, pool, func(conn *pgxpool.Conn) error {
		return meaning(roundTrip(ctx, conn, query{sql, args, scan}))
	})
}

// printHolders is for a key that is busy: who holds it, if this role may know. One line for each holder.
func printHolders(ctx context.Context, pool *pgxpool.Pool, key Key) {
	var lines *string
	err := ask(ctx, pool, func(row pgx.Row) error { return row.Scan(&lines) },
		"SELECT string_agg(concat_ws(', ', 'key held by ' || kind, 'process ' || pid, 'worker ' || worker,"+
			" 'since ' || since) || ': ' || detail, E'\n') FROM idem_holder($1, $2)", key.Key, orNull(key.Scope))
	if err == nil && lines != nil {
		fmt.Println(*lines)
	}
}

// WaitForJob waits until the job has ended. It returns its state; if the time is over, it prints why the job has not
// ended. (gone: the job is done, and its queue does not keep it.)
func WaitForJob(ctx context.Context, pool *pgxpool.Pool, job int64, timeout time.Duration) (state string, err error) {
	err = pool.QueryRow(ctx, "CALL idem_wait_job($1, $2)", job, interval(timeout)).Scan(&state, nil)
	if err != nil || state == "done" || state == "dead" || state == "cancelled" || state == "gone" {
		return state, err
	}
	var lines string
	err = pool.QueryRow(ctx, "SELECT string_agg(concat_ws(', ', format('job %s %s', $1::bigint, reason), 'process ' || pid,"+
		" 'since ' || since) || ': ' || detail, E'\n') FROM idem_why($1)", job).Scan(&lines)
	if err == nil {
		fmt.Println(lines)
	}
	return state, err
}

// finish stores the result of the key, commits, and sets *result to what a replay returns.
func finish(ctx context.Context, conn *pgxpool.Conn, stored, result any, sql string, args ...any) error {
	text, err := json.Marshal(stored)
	if err != nil {
		return err
	}
	args = append(args, string(text)) // a []byte would be sent as bytea
	if err := roundTrip(ctx, conn, query{sql: sql, args: args}, query{sql: "COMMIT"}); err != nil {
		return meaning(err)
	}
	return json.Unmarshal(text, result)
}

// A claim is the answer of idem_claim or idem_lease.
type claim struct {
	claimed    bool
	status     string
	result     *string // ::text, because pgx would return the binary form of jsonb
	token      *int64
	attempt    *int
	checkpoint *string
	seconds    *int64
}

func (c *claim) scan(row pgx.Row) error {
	return row.Scan(&c.claimed, &c.status, &c.result, &c.token, &c.attempt, &c.checkpoint, &c.seconds)
}

// replay sets *result to the stored result, or says why there is none.
func (c *claim) replay(result any) error {
	switch c.status {
	case "finished":
		if c.result == nil {
			return errors.New("the key was committed without a result: idem_claim ran in autocommit")
		}
		return json.Unmarshal([]byte(*c.result), result)
	case "busy":
		busy := &Busy{RetryAfter: time.Second}
		if c.seconds != nil && *c.seconds > 1 {
			busy.RetryAfter = time.Duration(*c.seconds) * time.Second
		}
		return busy
	}
	return ErrUndecided
}

// heartbeat calls beat in the background. The context that it returns ends when beat returns ErrStale. Another error
// says nothing about the lease. stop waits for the last beat and returns ErrStale or nil.
func heartbeat(ctx context.Context, every time.Duration, beat func() error) (working context.Context, stop func() error) {
	working, cancel := context.WithCancel(ctx)
	done, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-done:
				ended <- nil
				return
			case <-time.After(every):
				if errors.Is(beat(), ErrStale) {
					cancel()
					ended <- ErrStale
					return
				}
			}
		}
	}()
	return working, func() error {
		close(done)
		defer cancel()
		return <-ended
	}
}

// Intervals travel as text, with a cast in the statement: a driver has no common type for them.
func interval(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }

func orNull[T comparable](v T) any {
	var zero T
	if v == zero {
		return nil
	}
	if d, ok := any(v).(time.Duration); ok {
		return interval(d)
	}
	return v
}

// toJSON is NULL for nil: a request that is not compared.
func toJSON(v any) (any, error) {
	if v == nil {
		return nil, nil
	}
	text, err := json.Marshal(v)
	return string(text), err
}

func randomInt(n int64) int64 {
	v, err := rand.Int(rand.Reader, big.NewInt(n)) // math/rand gives every process the same numbers (before Go 1.20)
	if err != nil {
		panic(err)
	}
	return v.Int64()
}

func jitter(d time.Duration) time.Duration { return d/2 + time.Duration(randomInt(int64(d)/2)) }

func min(a, b time.Duration) time.Duration {
	if a < b {
		return a
	}
	return b
}
