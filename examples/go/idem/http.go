package idem

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v4/pgxpool"
)

// HTTP understands the Idempotency-Key header (draft-ietf-httpapi-idempotency-key-header-07).
//
//	http.Handle("/charges", idem.HTTP{Pool: pool, Scope: customerOf}.Once(func(tx idem.Tx, r *http.Request) (*idem.Response, error) { ... }))
//
// Handlers return their answer, because it must not be sent before the COMMIT. An error is a 500, and nothing is
// stored. A *Refusal with a *Response as its Result undoes the work and is stored.
type HTTP struct {
	Pool      *pgxpool.Pool
	Scope     func(r *http.Request) string // required: the customer, so that keys of two customers never meet; "": there is only one
	TTL, Wait time.Duration
}

// Response is stored as JSON. The body is text in it: jsonb would change the order of its fields.
type Response struct {
	Status  int         `json:"status"`
	Headers [][2]string `json:"headers"`
	Body    string      `json:"body"`
}

// JSON makes an answer. Further arguments are names and values of headers.
func JSON(status int, body any, headers ...string) *Response {
	text, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	r := &Response{status, [][2]string{{"Content-Type", "application/json"}}, string(text)}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Headers = append(r.Headers, [2]string{headers[i], headers[i+1]})
	}
	return r
}

// MarshalJSON refuses what jsonb cannot hold. encoding/json would replace bad bytes silently.
func (r *Response) MarshalJSON() ([]byte, error) {
	if !utf8.ValidString(r.Body) || strings.ContainsRune(r.Body, 0) {
		return nil, errors.New("the body of a stored answer must be UTF-8 text without NUL: encode it, or store a link")
	}
	type plain Response
	return json.Marshal((*plain)(r))
}

// Once is for handlers that work in the database.
func (h HTTP) Once(handler func(tx Tx, r *http.Request) (*Response, error)) http.Handler {
	return h.handle(func(ctx context.Context, key Key, r func() *http.Request) (*Response, bool, error) {
		return Once(ctx, h.Pool, key, func(tx Tx) (*Response, error) { return handler(tx, r()) })
	})
}

// Leased is for handlers that call the outside world: call does that, record stores what came of it.
func (h HTTP) Leased(lease time.Duration, call func(ctx context.Context, key string, l Lease, r *http.Request) (any, error),
	record func(tx Tx, outcome any, r *http.Request) (*Response, error)) http.Handler {
	return h.handle(func(ctx context.Context, key Key, r func() *http.Request) (*Response, bool, error) {
		// A client that goes away does not stop the call in the middle: its outcome would be unknown.
		ctx = detached{ctx}
		return Leased(ctx, h.Pool, key, lease,
			func(ctx context.Context, l Lease) (any, error) { return call(ctx, key.Key, l, r().WithContext(ctx)) },
			func(tx Tx, outcome any) (*Response, error) { return record(tx, outcome, r().WithContext(ctx)) })
	})
}

// detached has the values of a context, but does not end with it. (From Go 1.21 on: context.WithoutCancel.)
type detached struct{ context.Context }

func (detached) Deadline() (time.Time, bool) { return time.Time{}, false }
func (detached) Done() <-chan struct{}       { return nil }
func (detached) Err() error                  { return nil }

// A structured-field string, or (many clients send that) the bare key.
var quoted = regexp.MustCompile(`^"((?:[ !#-\[\]-~]|\\["\\])*)"$`)
var bare = regexp.MustCompile(`^[!#-\[\]-~]+$`)
var escaped = regexp.MustCompile(`\\(.)`)

// ParseKey returns "" if the header is not valid. A key has at most 1024 bytes.
func ParseKey(header string) string {
	key := ""
	if m := quoted.FindStringSubmatch(header); m != nil {
		key = escaped.ReplaceAllString(m[1], "$1")
	} else if bare.MatchString(header) {
		key = header
	}
	if len(key) > 1024 {
		return ""
	}
	return key
}

func (h HTTP) handle(run func(ctx context.Context, key Key, r func() *http.Request) (*Response, bool, error)) http.Handler {
	if h.Scope == nil {
		panic("idem.HTTP needs a Scope: the customer of a request")
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := r.Header.Values("Idempotency-Key")
		if len(header) != 1 {
			problem(w, 400, "The header Idempotency-Key is missing, or there are several.")
			return
		}
		key := Key{Key: ParseKey(header[0]), TTL: h.TTL, Wait: h.Wait}
		if key.Key == "" {
			problem(w, 400, "The header Idempotency-Key is not valid: 1 to 1024 visible ASCII characters.")
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<20))
		if err != nil {
			problem(w, 413, "The body is too large.")
			return
		}
		key.Scope = h.Scope(r)
		// The hash of the body, not the body: any bytes will do, and jsonb does not change them.
		sum := sha256.Sum256(body)
		key.Request = map[string]string{"method": r.Method, "path": r.URL.RequestURI(), "sha256": hex.EncodeToString(sum[:])}
		answer, replayed, err := run(r.Context(), key, func() *http.Request {
			r.Body = io.NopCloser(bytes.NewReader(body)) // the work may run again
			return r
		})
		var busy *Busy
		if errors.As(err, &busy) || errors.Is(err, ErrUndecided) {
			printHolders(r.Context(), h.Pool, key)
		}
		send(w, answer, replayed, err)
	})
}

func send(w http.ResponseWriter, answer *Response, replayed bool, err error) {
	var busy *Busy
	switch {
	case err == nil:
		for _, h := range answer.Headers {
			w.Header().Add(h[0], h[1])
		}
		if replayed {
			w.Header().Set("Idempotent-Replayed", "true")
		}
		w.WriteHeader(answer.Status)
		_, _ = io.WriteString(w, answer.Body)
	case errors.As(err, &busy):
		w.Header().Set("Retry-After", fmt.Sprint(int(busy.RetryAfter.Seconds())))
		problem(w, 409, "A request with this key is being processed.")
	case errors.Is(err, ErrStale):
		w.Header().Set("Retry-After", "1")
		problem(w, 409, "Another worker has taken over this request.")
	case errors.Is(err, ErrUndecided):
		problem(w, 409, "The outcome of this request is unknown: an operator has to decide.")
	case errors.Is(err, ErrMismatch):
		problem(w, 422, "This key was used with another request.")
	default:
		log.Print(err)
		problem(w, 500, "Internal error. Ask again with the same key.")
	}
}

func problem(w http.ResponseWriter, status int, title string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"title": title, "status": status})
}
