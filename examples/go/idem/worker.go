package idem

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v4"
	"github.com/jackc/pgx/v4/pgxpool"
)

// Job is what idem_fetch returned.
type Job struct {
	ID, Token   int64
	Attempt     int
	MaxAttempts int
	Queue       string
	Payload     json.RawMessage
}

// Worker runs the jobs of several queues. A handler that returns an error fails the job: idem retries it with the
// backoff of its queue. When there is nothing to do, the worker waits in the server, and the commit of the next job
// wakes it.
type Worker struct {
	Pool  *pgxpool.Pool
	Wait  time.Duration // the longest wait for a job; 0: 30 s
	Lease time.Duration // 0: 30 s; renewed while the handler runs
	Batch int           // how many leased jobs to fetch at once; 0: 1

	Transaction map[string]func(tx Tx, job Job) error               // job and work commit together
	Leased      map[string]func(ctx context.Context, job Job) error // the work leaves the database; ctx ends if the job is lost
}

// Run returns after ctx has ended: it ends what runs, and gives back jobs that it has not begun.
func (w *Worker) Run(ctx context.Context) {
	if w.Wait == 0 {
		w.Wait = 30 * time.Second
	}
	if w.Lease == 0 {
		w.Lease = 30 * time.Second
	}
	if w.Batch == 0 {
		w.Batch = 1
	}
	// One loop per mode: a slow call outside does not keep the other queues waiting.
	var loops sync.WaitGroup
	for _, l := range []struct {
		queues []string
		round  func(context.Context) (bool, error)
	}{{shuffled(w.Transaction), w.one}, {shuffled(w.Leased), w.several}} {
		if len(l.queues) == 0 {
			continue
		}
		loops.Add(1)
		go func(queues []string, round func(context.Context) (bool, error)) {
			defer loops.Done()
			w.loop(ctx, queues, round)
		}(l.queues, l.round)
	}
	loops.Wait()
}

func (w *Worker) loop(ctx context.Context, queues []string, round func(context.Context) (bool, error)) {
	for ctx.Err() == nil {
		found, err := round(ctx)
		if err == nil && !found {
			err = w.sleep(ctx, queues)
		}
		if err == nil || ctx.Err() != nil {
			continue
		}
		log.Printf("worker: %v", err) // the server is away, say: try again, with jitter
		select {
		case <-ctx.Done():
		case <-time.After(jitter(1500 * time.Millisecond)):
		}
	}
}

// sleep until a commit lets a job go. The session has no transaction while it waits.
func (w *Worker) sleep(ctx context.Context, queues []string) error {
	conn, err := w.Pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	_, err = conn.Exec(ctx, "CALL idem_wait_any($1, $2)", queues, interval(w.Wait))
	if ctx.Err() != nil && conn.Conn().IsClosed() {
		// The end of ctx cancels the wait in the server. Do not exit before the request has arrived: pgbouncer 1.18
		// ends if the client of a cancel request goes away.
		<-conn.Conn().PgConn().CleanupDone()
	}
	return err
}

const jobColumns = "SELECT f.job_id, f.token, f.attempt, f.max_attempts, f.queue, coalesce(f.payload, 'null')::text "

func (j *Job) scan(row pgx.Row) error {
	var payload string
	err := row.Scan(&j.ID, &j.Token, &j.Attempt, &j.MaxAttempts, &j.Queue, &payload)
	j.Payload = json.RawMessage(payload)
	return err
}

// one fetches a job, runs and completes it in one transaction. A crash gives the job back.
func (w *Worker) one(context.Context) (found bool, err error) {
	ctx := context.Background() // a stop does not interrupt the work
	queues := shuffled(w.Transaction)
	err = again(ctx, w.Pool, func(conn *pgxpool.Conn) error {
		var job Job
		err := roundTrip(ctx, conn, query{sql: "BEGIN"}, query{
			jobColumns + "FROM unnest($1::text[]) AS q, LATERAL idem_fetch(q, lease => '0', worker => $2) AS f LIMIT 1",
			[]any{queues, workerName()}, job.scan,
		}, query{sql: "SAVEPOINT idem_work"})
		if found = err != pgx.ErrNoRows; !found || err != nil {
			return ignore(err, pgx.ErrNoRows)
		}
		failure := safely(func() error { return w.Transaction[job.Queue](conn, job) })
		if failure == nil {
			failure = roundTrip(ctx, conn, query{sql: "SELECT idem_complete($1, $2)", args: []any{job.ID, job.Token}})
		}
		if conn.Conn().IsClosed() {
			return failure
		}
		if failure != nil {
			// A plain ROLLBACK would undo the fetch, too: no attempt counted, no backoff.
			err := roundTrip(ctx, conn, query{sql: "ROLLBACK TO SAVEPOINT idem_work"},
				query{sql: "SELECT idem_fail($1, $2, $3)", args: []any{job.ID, job.Token, failure.Error()}})
			if err != nil {
				return err
			}
		}
		return roundTrip(ctx, conn, query{sql: "COMMIT"})
	})
	return found, err
}

// several fetches jobs with a lease, in autocommit. No transaction is open during the work.
func (w *Worker) several(stop context.Context) (found bool, err error) {
	ctx := context.Background()
	queues := shuffled(w.Leased)
	var jobs []Job
	err = again(ctx, w.Pool, func(conn *pgxpool.Conn) error {
		jobs = nil
		rows, err := conn.Query(ctx, jobColumns+"FROM unnest($1::text[]) AS q,"+
			" LATERAL idem_fetch(q, batch => $2, lease => $3::interval, worker => $4) AS f",
			queues, w.Batch, interval(w.Lease), workerName())
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var job Job
			if err := job.scan(rows); err != nil {
				return err
			}
			jobs = append(jobs, job)
		}
		return rows.Err()
	})
	for i, job := range jobs {
		if stop.Err() != nil { // not begun: give it back, the attempt does not count
			w.end(job, "SELECT idem_snooze($1, $2, '0')")
		} else {
			w.call(job, jobs[i+1:], i > 0)
		}
	}
	return len(jobs) > 0, err
}

// call runs one job. Meanwhile the heartbeat extends its lease and those of the jobs that wait behind it.
func (w *Worker) call(job Job, waiting []Job, late bool) {
	ids, tokens := []int64{job.ID}, []int64{job.Token}
	for _, j := range waiting {
		ids, tokens = append(ids, j.ID), append(tokens, j.Token)
	}
	beat := func() error {
		var status string
		err := ask(context.Background(), w.Pool, func(row pgx.Row) error { return row.Scan(&status) },
			"SELECT status FROM idem_heartbeat($1::bigint[], $2::bigint[], $3::interval) ORDER BY ord", ids, tokens, interval(w.Lease))
		if err == nil && status != "renewed" {
			err = ErrStale
		}
		return err
	}
	if late && beat() == ErrStale {
		return // it waited behind another job, and somebody has taken or cancelled it meanwhile
	}
	working, stop := heartbeat(context.Background(), w.Lease/3, beat)
	failure := safely(func() error { return w.Leased[job.Queue](working, job) })
	if lost := stop(); lost != nil {
		log.Printf("worker: job %d: %v", job.ID, lost)
	} else if failure != nil {
		w.end(job, "SELECT idem_fail($1, $2, $3)", failure.Error())
	} else {
		w.end(job, "SELECT idem_complete($1, $2)")
	}
}

// end reports what became of the job. ErrStale: another worker has it, or an answer was lost and the job has ended.
func (w *Worker) end(job Job, sql string, args ...any) {
	args = append([]any{job.ID, job.Token}, args...)
	if err := ask(context.Background(), w.Pool, nil, sql, args...); err != nil {
		log.Printf("worker: job %d: %v", job.ID, err)
	}
}

// safely makes an error of a panic: the job fails, the worker goes on.
func safely(handler func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return handler()
}

func workerName() string {
	host, _ := os.Hostname()
	return fmt.Sprintf("%s:%d", host, os.Getpid())
}

// shuffled returns the queues in random order, so that a full queue does not starve the others.
func shuffled[F any](handlers map[string]F) []string {
	var queues []string
	for q := range handlers { // Go ranges over a map in random order
		queues = append(queues, q)
	}
	return queues
}

func ignore(err, which error) error {
	if err == which {
		return nil
	}
	return err
}
