// pgx (version 4, as Debian has it)
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"time"

	"github.com/jackc/pgconn"
	"github.com/jackc/pgx/v4"
)

var (
	ctx    = context.Background()
	failed bool
)

func fact(text string, got, wanted interface{}) {
	if reflect.DeepEqual(got, wanted) {
		fmt.Println("ok - pgx:", text)
	} else {
		failed = true
		fmt.Printf("not ok - pgx: %s: got %v, wanted %v\n", text, got, wanted)
	}
}

func state(err error) string {
	var pg *pgconn.PgError
	if err == nil {
		return "no error"
	} else if errors.As(err, &pg) {
		return pg.Code
	}
	return err.Error()
}

func open(simple bool) *pgx.Conn {
	config, err := pgx.ParseConfig(os.Getenv("POOLED_URL"))
	if err != nil {
		panic(err)
	}
	config.PreferSimpleProtocol = simple
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		panic(err)
	}
	return conn
}

type querier interface {
	QueryRow(context.Context, string, ...interface{}) pgx.Row
}

func ask(on querier, dest interface{}, sql string, args ...interface{}) error {
	return on.QueryRow(ctx, sql, args...).Scan(dest)
}

const claim = "SELECT status FROM idem_claim($1, request => $2::jsonb, wait => $3::interval)"

func prepared(simple bool) string {
	one, other := open(simple), open(true)
	defer one.Close(ctx)
	defer other.Close(ctx)
	var s string
	if err := ask(one, &s, "SELECT $1::text", "x"); err != nil {
		return state(err)
	}
	tx, _ := other.Begin(ctx) // takes the server connection that was used last
	defer tx.Rollback(ctx)
	ask(tx, &s, "SELECT 'x'::text")
	return state(ask(one, &s, "SELECT $1::text", "x"))
}

func main() {
	conn := open(true)
	var s string
	var b bool
	tx, _ := conn.Begin(ctx)
	fact("conn.Begin(); a string with JSON, a string as interval", []interface{}{state(ask(tx, &s, claim, "gx", `{"a": 1}`, "2 s")), s}, []interface{}{"no error", "claimed"})
	ask(tx, &b, "SELECT idem_finish($1, $2::jsonb)", "gx", `{"x": 1}`)
	fact("tx.Commit()", state(tx.Commit(ctx)), "no error")
	fact("SQLSTATE: errors.As(err, &pgErr), pgErr.Code", state(ask(conn, &s, claim, "gx", "2", "0")), "ID001")
	var result map[string]int
	ask(conn, &result, "SELECT result FROM idem_get('gx')")
	fact("a jsonb result scans into a Go value", result, map[string]int{"x": 1})
	tx, _ = conn.Begin(ctx)
	ask(tx, &s, claim, "gx2", "1", "0")
	ask(tx, &s, "SELECT (1 / 0)::text")
	fact("Commit() of a failed transaction: pgx.ErrTxCommitRollback", errors.Is(tx.Commit(ctx), pgx.ErrTxCommitRollback), true)
	tx, _ = conn.Begin(ctx)
	ask(tx, &s, claim, "gx3", "1", "0")
	inner, _ := tx.Begin(ctx)
	ask(inner, &s, "SELECT (1 / 0)::text")
	inner.Rollback(ctx)
	ask(tx, &b, "SELECT idem_finish('gx3', '402')")
	fact("tx.Begin() is a savepoint: the claim stays", state(tx.Commit(ctx)), "no error")
	var token int64
	ask(conn, &token, "SELECT token FROM idem_lease('gxl', $1::interval)", 30*time.Second)
	fact("a time.Duration is an interval; a token is an int64", token > 0, true)
	fact("a token as parameter needs no cast", []interface{}{state(ask(conn, &b, "SELECT idem_finish('gxl', '1', $1)", token)), b}, []interface{}{"no error", true})
	var n int
	ask(conn, &n, "SELECT count(*) FROM idem_heartbeat($1::bigint[], $2::bigint[], '5 s')", []int64{1}, []int64{2})
	fact("[]int64 is an array parameter", n, 1)
	ask(conn, &n, "SELECT job_id FROM idem_enqueue('gxw')")
	fact("CALL idem_wait returns a row", []interface{}{state(ask(conn, &b, "CALL idem_wait($1, $2)", "gxw", "30 s")), b}, []interface{}{"no error", true})
	var queue string
	conn.QueryRow(ctx, "CALL idem_wait_any($1)", []string{"gxnone", "gxw"}).Scan(&b, &queue)
	fact("[]string is an array of queues", queue, "gxw")
	tx, _ = conn.Begin(ctx)
	fact("CALL idem_wait in a transaction: 25001", state(ask(tx, &b, "CALL idem_wait('gxw')")), "25001")
	tx.Rollback(ctx)
	waiting, stop := context.WithTimeout(ctx, 200*time.Millisecond)
	other := open(true)
	err := other.QueryRow(waiting, "CALL idem_wait('gxnone', '60 s')").Scan(&b)
	fact("the end of the context ends a wait, and closes the connection", []bool{err != nil, waiting.Err() != nil, other.IsClosed()}, []bool{true, true, true})
	stop()
	fact("default (prepared and cached) behind pgbouncer: 26000 or 42P05", map[string]bool{"26000": true, "42P05": true}[prepared(false)], true)
	fact("PreferSimpleProtocol works behind pgbouncer", prepared(true), "no error")
	if failed {
		os.Exit(1)
	}
}
