// The example program: a shop that charges, mails and indexes each order once.
//
// app serve PORT | app work; DATABASE_URL and WORKER_URL name the database.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"idem-example/idem"

	"github.com/jackc/pgx/v4"
	"github.com/jackc/pgx/v4/pgxpool"
)

func openPool(url string) *pgxpool.Pool {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		log.Fatal(err)
	}
	config.MaxConns = 20
	config.LazyConnect = true
	config.ConnConfig.PreferSimpleProtocol = true // pgbouncer in transaction mode: no prepared statements
	pool, err := pgxpool.ConnectConfig(context.Background(), config)
	if err != nil {
		log.Fatal(err)
	}
	return pool
}

// It stands for a mail server: a connection of its own, in autocommit.
func sendMail(ctx context.Context, mailer *pgxpool.Pool, to string, gate int) error {
	_, err := mailer.Exec(ctx, "INSERT INTO outside (what) VALUES ('mail:' || $1::text)", to)
	if err == nil && gate != 0 {
		_, err = mailer.Exec(ctx, "SELECT pg_advisory_lock($1), pg_advisory_unlock($1)", gate)
	}
	return err
}

type chargeRequest struct {
	Order, Cents, Gate int
	Fail               string
}

type chargeAnswer struct {
	Order    int   `json:"order"`
	ChargeID int64 `json:"charge_id"`
	Cents    int   `json:"cents"`
}

func charge(tx idem.Tx, r *http.Request) (*idem.Response, error) {
	var asked chargeRequest
	if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
		return nil, err
	}
	var id int64
	err := tx.QueryRow(r.Context(), "INSERT INTO charges (order_id, cents) VALUES ($1, $2) RETURNING id",
		asked.Order, asked.Cents).Scan(&id)
	if err == nil && asked.Gate != 0 {
		_, err = tx.Exec(r.Context(), "SELECT pg_advisory_xact_lock($1)", asked.Gate)
	}
	if err == nil && asked.Fail == "throw" {
		err = errors.New("asked to throw")
	}
	if err == nil && asked.Fail == "denied" {
		_, err = tx.Exec(r.Context(), "SELECT * FROM forbidden")
	}
	if err != nil {
		return nil, err
	}
	if asked.Fail == "swallow" {
		_, _ = tx.Exec(r.Context(), "SELECT * FROM forbidden") // a mistake: the transaction has failed
	}
	if asked.Cents > 100000 {
		return nil, &idem.Refusal{Result: idem.JSON(402, map[string]string{"error": "too much"})}
	}
	return idem.JSON(201, chargeAnswer{asked.Order, id, asked.Cents}, "Location", fmt.Sprintf("/charges/%d", id)), nil
}

type mailRequest struct {
	To         string
	Gate, Fail int
}

func touch(pool *pgxpool.Pool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var order int
		var job int64
		var asked struct {
			Rollback bool
			Wait     *float64 // seconds
		}
		if _, err := fmt.Sscanf(r.URL.Path, "/orders/%d/touch", &order); err != nil {
			http.NotFound(w, r)
			return
		}
		_ = json.NewDecoder(r.Body).Decode(&asked)
		rollback := errors.New("rollback")
		err := pool.BeginFunc(r.Context(), func(tx pgx.Tx) error {
			if _, err := tx.Exec(r.Context(), "UPDATE orders SET version = version + 1 WHERE id = $1", order); err != nil {
				return err
			}
			err := tx.QueryRow(r.Context(), "SELECT job_id FROM idem_enqueue('index', $1::jsonb, key => $2)",
				fmt.Sprintf(`{"order": %d}`, order), fmt.Sprintf("order:%d", order)).Scan(&job)
			if err == nil && asked.Rollback {
				err = rollback
			}
			return err
		})
		state := "done"
		if err == nil && asked.Wait != nil {
			state, err = idem.WaitForJob(r.Context(), pool, job, time.Duration(*asked.Wait*float64(time.Second)))
		}
		switch err {
		case nil:
			if state != "done" && state != "gone" {
				w.WriteHeader(202)
			}
			fmt.Fprintf(w, `{"touched":%d}`, order)
		case rollback:
			w.WriteHeader(409)
		default:
			log.Print(err)
			w.WriteHeader(500)
		}
	}
}

func serve(port string) {
	pool, mailer := openPool(os.Getenv("DATABASE_URL")), openPool(os.Getenv("DATABASE_URL"))
	// the header stands for a login
	shop := idem.HTTP{Pool: pool, Scope: func(r *http.Request) string { return r.Header.Get("X-Customer") }}
	http.Handle("/charges", shop.Once(charge))
	http.Handle("/mails", shop.Leased(10*time.Second,
		func(ctx context.Context, key string, l idem.Lease, r *http.Request) (any, error) {
			var asked mailRequest
			if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
				return nil, &idem.NotDone{Err: err}
			}
			return asked.To, sendMail(ctx, mailer, asked.To, asked.Gate)
		},
		func(tx idem.Tx, to any, r *http.Request) (*idem.Response, error) {
			_, err := tx.Exec(r.Context(), "INSERT INTO sent (recipient) VALUES ($1)", to)
			return idem.JSON(201, map[string]any{"sent": to}), err
		}))
	http.Handle("/orders/", touch(pool))
	http.HandleFunc("/health", func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "ok") })
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("ready")
	log.Fatal(http.Serve(listener, nil))
}

func work() {
	pool, mailer := openPool(os.Getenv("WORKER_URL")), openPool(os.Getenv("WORKER_URL"))
	stop, _ := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	// At each start: the next tick stays as it is.
	if _, err := pool.Exec(stop, "SELECT idem_schedule('heal', 'heal', every => '1 hour')"); err != nil {
		log.Fatal(err)
	}
	worker := &idem.Worker{Pool: pool, Wait: time.Minute, Lease: 10 * time.Second, Batch: 10,
		Transaction: map[string]func(idem.Tx, idem.Job) error{
			"index": func(tx idem.Tx, job idem.Job) error {
				var order struct{ Order int }
				if err := json.Unmarshal(job.Payload, &order); err != nil {
					return err
				}
				// Two runs of one key can overlap. The lock puts them in order: the later one reads the later version.
				_, err := tx.Exec(context.Background(), "INSERT INTO indexed SELECT id, version FROM orders WHERE id = $1"+
					" FOR NO KEY UPDATE ON CONFLICT (order_id) DO UPDATE SET version = excluded.version", order.Order)
				return err
			},
			"heal": func(tx idem.Tx, job idem.Job) error {
				_, err := tx.Exec(context.Background(), "SELECT enqueue_stale_orders()")
				return err
			}},
		Leased: map[string]func(context.Context, idem.Job) error{
			"mail": func(ctx context.Context, job idem.Job) error {
				var mail mailRequest
				if err := json.Unmarshal(job.Payload, &mail); err != nil {
					return err
				}
				if job.Attempt <= mail.Fail {
					return errors.New("asked to fail")
				}
				return sendMail(ctx, mailer, mail.To, mail.Gate)
			}},
	}
	go func() {
		<-stop.Done()
		fmt.Println("stopping")
	}()
	fmt.Println("ready")
	worker.Run(stop)
}

func main() {
	if len(os.Args) == 3 && os.Args[1] == "serve" {
		serve(os.Args[2])
	} else {
		work()
	}
}
