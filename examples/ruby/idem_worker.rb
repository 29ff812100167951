# frozen_string_literal: true

# A worker for the queues of idem, on top of idem.rb.
#
#   worker = Idem::Worker.new(pool)
#   worker.transaction('index') { |conn, job| ... }   # job and work commit together
#   worker.leased('mail') { |job| ... }               # the work leaves the database
#   trap('TERM') { worker.stop }
#   worker.run                                        # until stop: ends what runs, gives back the rest
#
# A block that raises an error fails the job: idem retries it with the backoff of its queue. If a leased job is lost
# to another worker, Idem::Stale is raised in its block, in the next thing that blocks. When there is nothing to do, the
# worker waits in the server, and the commit of the next job wakes it.

require_relative 'idem'

module Idem
  Job = Struct.new(:id, :token, :attempt, :max_attempts, :queue, :payload)

  class Worker
    FETCH = 'SELECT f.job_id::text, f.token::text, f.attempt::text, f.max_attempts::text, f.queue, f.payload::text' \
            ' FROM unnest($1::text[]) AS q, LATERAL'

    def initialize(pool, wait: 30, lease: 30, batch: 1)
      @pool = pool
      @wait = wait
      @lease = lease
      @batch = batch
      @name = "#{Socket.gethostname}:#{Process.pid}"
      @transaction = {}
      @leased = {}
      @stopping = false
    end

    def transaction(queue, &handler)
      @transaction[queue] = handler
    end

    def leased(queue, &handler)
      @leased[queue] = handler
    end

    # Only a flag: a trap handler may not take a lock.
    def stop
      @stopping = true
    end

    # One thread per mode, so that a slow call outside does not keep the other queues waiting.
    def run
      loops = []
      loops << Thread.new { work(@transaction.keys) { one } } unless @transaction.empty?
      loops << Thread.new { work(@leased.keys) { several } } unless @leased.empty?
      loops.each { |loop| loop.abort_on_exception = true } # no worker that has lost one of its loops
      loops.each(&:join)
    end

    private

    def work(queues)
      until @stopping
        begin
          yield || wait(queues)
        rescue PG::Error => e
          warn "worker: #{e.message}" # the server is away, say: try again, with jitter
          pause(rand(0.5..1.5))
        end
      end
    end

    # Until a commit lets a job go. The session has no transaction while it waits. A trap handler cannot cancel the
    # wait, so look at the flag ten times per second; the first cancel may come before the server has the statement.
    def wait(queues)
      @pool.with do |conn|
        conn.send_query_params('CALL idem_wait_any($1, $2)', [text_array(queues), "#{@wait} s"])
        until conn.block(0.1)
          conn.cancel if @stopping
        end
        conn.get_last_result
      end
    rescue PG::QueryCanceled
      raise unless @stopping # statement_timeout: shorter than the wait
    end

    # A sleep in short pieces, because a trap handler cannot signal a condition variable.
    def pause(seconds)
      deadline = now + seconds
      sleep(0.05) until @stopping || now >= deadline
    end

    def now
      Process.clock_gettime(Process::CLOCK_MONOTONIC)
    end

    # Fetch, work and complete in one transaction: a crash gives the job back.
    def one
      Idem.again(@pool) do |conn|
        _, rows, = Idem.pipeline(conn, ['BEGIN'],
                                 ["#{FETCH} idem_fetch(q, lease => '0', worker => $2) AS f LIMIT 1",
                                  [text_array(@transaction.keys.shuffle), @name]],
                                 ['SAVEPOINT idem_work'])
        next false if rows.ntuples.zero?

        job = to_job(rows[0])
        begin
          @transaction[job.queue].call(conn, job)
          conn.exec_params('SELECT idem_complete($1, $2)', [job.id, job.token])
        rescue StandardError => e
          raise unless conn.status == PG::CONNECTION_OK

          # A plain ROLLBACK would undo the fetch, too: no attempt counted, no backoff.
          conn.exec('ROLLBACK TO SAVEPOINT idem_work')
          conn.exec_params('SELECT idem_fail($1, $2, $3)', [job.id, job.token, e.message])
        end
        Idem.commit(conn)
        true
      end
    end

    # Fetch with a lease, in autocommit. No transaction is open during the work.
    def several
      jobs = Idem.ask(@pool, "#{FETCH} idem_fetch(q, batch => $2, lease => $3::interval, worker => $4) AS f",
                      text_array(@leased.keys), @batch, "#{@lease} s", @name).map { |row| to_job(row) }
      jobs.each_with_index do |job, i|
        if @stopping # not begun: give it back, the attempt does not count
          finish(job, "SELECT idem_snooze($1, $2, '0')")
        else
          call(job, jobs[i..], i.positive?)
        end
      end
      jobs.any?
    end

    # Meanwhile the heartbeat extends the lease of the job and of those that wait behind it.
    def call(job, held, late)
      beat = lambda do
        status = Idem.ask(@pool, 'SELECT status FROM idem_heartbeat($1::bigint[], $2::bigint[], $3::interval) ORDER BY ord',
                          "{#{held.map(&:id).join(',')}}", "{#{held.map(&:token).join(',')}}", "#{@lease} s")[0]['status']
        raise Stale, 'another worker has the job' if status != 'renewed'
      end
      beat.call if late # it waited behind another job: is it still ours?
      Idem.heartbeat(@lease / 3.0, beat) { @leased[job.queue].call(job) }
      finish(job, 'SELECT idem_complete($1, $2)')
    rescue Stale => e
      warn "worker: job #{job.id}: #{e.message}"
    rescue StandardError => e
      finish(job, 'SELECT idem_fail($1, $2, $3)', e.message)
    end

    # Stale: another worker has the job, or an answer was lost and the job has ended.
    def finish(job, sql, *args)
      Idem.ask(@pool, sql, job.id, job.token, *args)
    rescue Stale => e
      warn "worker: job #{job.id}: #{e.message}"
    end

    def to_job(row)
      Job.new(row['job_id'].to_i, row['token'].to_i, row['attempt'].to_i, row['max_attempts'].to_i, row['queue'],
              row['payload'] && JSON.parse(row['payload']))
    end

    def text_array(names)
      PG::TextEncoder::Array.new.encode(names)
    end
  end
end
