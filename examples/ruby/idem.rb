# frozen_string_literal: true

# Run work once per idempotency key, with the PostgreSQL extension idem and ruby-pg.
#
# Idem.once:   the work is in the database. Key, work and result commit in one transaction.
# Idem.leased: the work leaves the database (a mail, a card). A lease keeps others out, a token keeps a late worker out.
#
# The pool is anything with `with { |conn| ... }` that gives a PG::Connection and drops broken ones: Idem::Pool, or
# ConnectionPool with a check. exec_params prepares no named statement, so pgbouncer in transaction mode is fine.

require 'json'
require 'pg'
require 'securerandom'
require 'socket'

module Idem
  Answer = Struct.new(:result, :replayed)
  Lease = Struct.new(:token, :attempt, :checkpoint)

  # Another request with this key runs now. Ask again after retry_after seconds.
  class Busy < StandardError
    attr_reader :retry_after

    def initialize(seconds)
      super('another request with this key is being processed')
      @retry_after = [1, seconds.to_i].max
    end
  end

  class Mismatch < StandardError; end  # the key was used with another request (ID001)
  class Stale < StandardError; end     # another worker has taken over (ID003): nothing of this attempt was stored
  class Finished < StandardError; end  # the key is finished (ID004)
  class Undecided < StandardError; end # the key is parked or exhausted: an operator has to decide
  class NotDone < StandardError; end   # raise it in a call if nothing has happened outside: the lease is released

  # Raise it in the work: its changes are rolled back, and the result is stored like any other.
  class Refusal < StandardError
    attr_reader :result

    def initialize(result)
      super('refused')
      @result = result
    end
  end

  MEANING = { 'ID001' => Mismatch, 'ID003' => Stale, 'ID004' => Finished }.freeze
  TRIES = 8

  # A pool in twenty lines: at most `size` connections, opened when needed.
  class Pool
    def initialize(url, size: 20)
      @url = url
      @free = Queue.new
      size.times { @free << nil }
    end

    def with
      conn = @free.pop
      conn ||= PG.connect(@url)
      yield conn
    ensure
      # A connection that is lost or not idle (an error, Thread#raise in the middle) is not used again.
      if conn && !Idem.idle?(conn)
        conn.close unless conn.finished?
        conn = nil
      end
      @free << conn
    end
  end

  module_function

  # Yields the connection of the transaction that claims the key, or returns the stored result. The request and the
  # result are anything that to_json takes. The block neither commits nor rolls back.
  def once(pool, key, request = nil, scope: nil, ttl: nil, wait: 0)
    again(pool) do |conn|
      # One round trip. The savepoint comes after the claim, so that a refusal can be stored.
      _, claim, = meaning do
        pipeline(conn, ['BEGIN'],
                 ['SELECT status, result::text FROM idem_claim($1, request => $2::jsonb, ttl => $3::interval,' \
                  ' wait => $4::interval, scope => $5)', [key, request&.to_json, seconds(ttl), seconds(wait), scope]],
                 ['SAVEPOINT idem_work'])
      end
      next not_claimed(claim[0]) unless claim[0]['status'] == 'claimed'

      begin
        result = yield conn
      rescue Refusal => e
        conn.exec('ROLLBACK TO SAVEPOINT idem_work')
        result = e.result
      end
      finish(conn, key, result, nil, scope)
    end
  end

  # call.(lease) outside of any transaction, then the block with the connection of the transaction that finishes the
  # key, and with what the call returned. The lease (in seconds) is renewed while the call runs. If another worker has
  # taken over, Stale is raised in the call, in the next thing that blocks. The call may happen twice: pass the key on.
  def leased(pool, key, request, call, lease: 30, scope: nil, ttl: nil, max_attempts: nil, &record)
    # The name is new for each call: two calls with the same name would share the lease. If the answer is lost, the
    # second try gets the same lease again.
    worker = "#{Socket.gethostname}:#{Process.pid}:#{SecureRandom.uuid}"
    row = ask(pool, 'SELECT status, result::text, token::text, attempt::text, checkpoint::text, ceil(extract(epoch FROM lease_until - clock_timestamp()))::bigint AS seconds' \
                    ' FROM idem_lease($1, $2::interval, request => $3::jsonb, ttl => $4::interval, worker => $5,' \
                    ' max_attempts => $6, scope => $7)',
              key, seconds(lease), request&.to_json, seconds(ttl), worker, max_attempts, scope)[0]
    return not_claimed(row) unless %w[claimed resumed].include?(row['status'])

    token = row['token']
    begin
      # The renewal ends before the fence: a renewal from another session would wait for the fence.
      renew = -> { ask(pool, 'SELECT idem_renew($1, $2, $3::interval, $4)', key, token, seconds(lease), scope) }
      outcome = heartbeat(lease / 3.0, renew) do
        call.call(Lease.new(token.to_i, row['attempt'].to_i, row['checkpoint'] && JSON.parse(row['checkpoint'])))
      end
      fenced(pool, key, token, scope) { |conn| record.call(conn, outcome) }
    rescue Refusal => e
      fenced(pool, key, token, scope) { e.result }
    rescue NotDone
      ask(pool, 'SELECT idem_release($1, $2, $3)', key, token, scope)
      raise
    end
  end

  # For a key that is busy: who holds it, if this role may know. One line for each holder.
  def print_holders(pool, key, scope = nil)
    lines = ask(pool, "SELECT string_agg(concat_ws(', ', 'key held by ' || kind, 'process ' || pid, 'worker ' || worker," \
                      " 'since ' || since) || ': ' || detail, E'\\n') AS lines FROM idem_holder($1, $2)",
                key, scope)[0]['lines']
    puts lines if lines
  end

  # Wait until the job has ended. Returns its state; if the time is over, prints why the job has not ended.
  def wait_for_job(pool, job_id, timeout = 30)
    state = ask(pool, 'CALL idem_wait_job($1::bigint, $2)', job_id, seconds(timeout))[0]['state']
    unless %w[done dead cancelled gone].include?(state) # gone: done, and its queue does not keep it
      puts ask(pool, "SELECT string_agg(concat_ws(', ', format('job %s %s', $1::bigint, reason), 'process ' || pid," \
                     " 'since ' || since) || ': ' || detail, E'\\n') AS lines FROM idem_why($1::bigint)", job_id)[0]['lines']
    end
    state
  end

  def fenced(pool, key, token, scope)
    again(pool) do |conn|
      meaning { pipeline(conn, ['BEGIN'], ['SELECT idem_fence($1, $2, $3)', [key, token, scope]]) }
      finish(conn, key, yield(conn), token, scope)
    end
  rescue Finished # our COMMIT happened, its answer was lost
    Answer.new(not_claimed(ask(pool, 'SELECT status, result::text FROM idem_get($1, $2)', key, scope)[0]).result, false)
  end

  def finish(conn, key, result, token, scope)
    stored = result.to_json
    meaning { conn.exec_params('SELECT idem_finish($1, $2::jsonb, $3, $4)', [key, stored, token, scope]) }
    commit(conn)
    Answer.new(JSON.parse(stored), false) # what a replay returns: strings instead of symbols
  end

  # COMMIT of a transaction that has failed answers ROLLBACK, and that is no error: look at the tag.
  def commit(conn)
    raise PG::InFailedSqlTransaction, 'rolled back at COMMIT' unless conn.exec('COMMIT').cmd_status == 'COMMIT'
  end

  def not_claimed(row)
    case row['status']
    when 'finished' then Answer.new(row['result'] && JSON.parse(row['result']), true)
    when 'busy' then raise Busy, row['seconds']
    else raise Undecided, "the key is #{row['status']}: an operator has to decide"
    end
  end

  # Only errors of idem's own functions get a meaning. The same SQLSTATE from the work stays what it is.
  def meaning
    yield
  rescue PG::Error => e
    raise MEANING.fetch(e.result&.error_field(PG::PG_DIAG_SQLSTATE)) { raise }, e.message
  end

  def idle?(conn)
    !conn.finished? && conn.status == PG::CONNECTION_OK && conn.transaction_status == PG::PQTRANS_IDLE
  end

  # One function of idem, in autocommit.
  def ask(pool, sql, *args)
    again(pool) { |conn| meaning { conn.exec_params(sql, args) } }
  end

  # Yields a connection, once more if it was lost or the server asks for it (40001, 40P01). A COMMIT without an answer
  # may have happened. The key knows, and the block asks it first, each time.
  def again(pool)
    (1..TRIES).each do |n|
      conn = nil
      begin
        return pool.with do |c|
          conn = c
          yield c
        ensure
          c.exec('ROLLBACK') if [PG::PQTRANS_INTRANS, PG::PQTRANS_INERROR].include?(c.transaction_status)
        end
      rescue PG::Error => e
        lost = conn.nil? || conn.finished? || conn.status != PG::CONNECTION_OK # the pool may have closed it
        raise if n == TRIES || !(lost || e.is_a?(PG::TRSerializationFailure) || e.is_a?(PG::TRDeadlockDetected))
      end
      sleep(rand(0.5..1.0) * [2, 0.05 * 2**n].min)
    end
  end

  # Sends all statements, then reads all results: one round trip.
  def pipeline(conn, *statements)
    conn.enter_pipeline_mode
    statements.each { |sql, args| conn.send_query_params(sql, args || []) }
    conn.pipeline_sync
    results = statements.map do
      conn.get_result.tap { conn.get_result } || raise(PG::ConnectionBad, 'connection lost') # a nil ends each result
    end
    conn.get_result # of the sync
    conn.exit_pipeline_mode
    results.each(&:check)
  rescue ArgumentError # a parameter that cannot be sent (a NUL in it): the pipeline is half full
    conn.close
    raise
  end

  # Calls beat every so many seconds in another thread while the block runs, and raises Stale in the block if beat
  # does. handle_interrupt keeps that exception inside the block.
  def heartbeat(every, beat)
    worker = Thread.current
    lock = Mutex.new
    signal = ConditionVariable.new
    ended = false
    Thread.handle_interrupt(Stale => :never) do
      beater = Thread.new do
        loop do
          break if lock.synchronize { ended || (signal.wait(lock, every) && ended) }

          beat.call
        rescue Stale => e
          break worker.raise(e)
        rescue PG::Error
          next # says nothing about the lease: again
        end
      end
      begin
        Thread.handle_interrupt(Stale => :on_blocking) { yield }
      ensure
        lock.synchronize { (ended = true) && signal.signal }
        beater.join
      end
    end
  end

  def seconds(number)
    number && "#{number} s"
  end
end
