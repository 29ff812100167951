# frozen_string_literal: true

# The example program: a shop that charges, mails and indexes each order once.
#
# app.rb serve PORT | app.rb work; DATABASE_URL and WORKER_URL name the database.

require 'json'
require 'puma'
require 'puma/server'
require 'rack'
require_relative 'idem_http'
require_relative 'idem_worker'

$stdout.sync = true

def answer(status, body, headers = {})
  [status, { 'Content-Type' => 'application/json' }.merge(headers), [body.to_json]]
end

def asked(env)
  env['rack.input'].rewind
  JSON.parse(env['rack.input'].read)
end

# It stands for a mail server: a connection of its own, in autocommit.
def send_mail(mailer, to, gate)
  mailer.with do |conn|
    conn.exec_params("INSERT INTO outside (what) VALUES ('mail:' || $1::text)", [to])
    conn.exec_params('SELECT pg_advisory_lock($1), pg_advisory_unlock($1)', [gate]) if gate
  end
end

def charge(env)
  conn = env['idem.conn']
  asked = asked(env)
  id = conn.exec_params('INSERT INTO charges (order_id, cents) VALUES ($1, $2) RETURNING id',
                        asked.values_at('order', 'cents')).getvalue(0, 0).to_i
  conn.exec_params('SELECT pg_advisory_xact_lock($1)', [asked['gate']]) if asked['gate']
  raise 'asked to throw' if asked['fail'] == 'throw'

  conn.exec('SELECT * FROM forbidden') if asked['fail'] == 'denied'
  if asked['fail'] == 'swallow'
    begin
      conn.exec('SELECT * FROM forbidden')
    rescue PG::Error # a mistake: the transaction has failed
    end
  end
  raise Idem::Refusal, answer(402, { error: 'too much' }) if asked['cents'] > 100_000

  answer(201, { order: asked['order'], charge_id: id, cents: asked['cents'] }, 'Location' => "/charges/#{id}")
end

def touch(pool, env)
  order = env['PATH_INFO'][%r{\A/(\d+)/touch\z}, 1] or return answer(404, { error: 'not found' })
  rollback, wait = asked(env).values_at('rollback', 'wait')
  job = pool.with do |conn|
    conn.exec('BEGIN')
    conn.exec_params('UPDATE orders SET version = version + 1 WHERE id = $1', [order])
    job = conn.exec_params("SELECT job_id FROM idem_enqueue('index', $1::jsonb, key => $2)",
                           [{ order: order.to_i }.to_json, "order:#{order}"])[0]
    conn.exec(rollback ? 'ROLLBACK' : 'COMMIT')
    job['job_id']
  end
  return answer(409, { touched: nil }) if rollback

  ended = wait.nil? || %w[done gone].include?(Idem.wait_for_job(pool, job, wait))
  answer(ended ? 200 : 202, { touched: order.to_i })
end

def shop(pool, mailer)
  customer = ->(env) { env['HTTP_X_CUSTOMER'] } # stands for a login
  mail = ->(env, _lease) { asked(env).then { |m| send_mail(mailer, m['to'], m['gate']) } }
  Rack::Builder.app do
    map('/charges') do
      use Idem::HTTP, pool, scope: customer
      run ->(env) { charge(env) }
    end
    map('/mails') do
      use Idem::HTTP, pool, scope: customer, lease: 10, call: mail
      run lambda { |env|
        env['idem.conn'].exec_params('INSERT INTO sent (recipient) VALUES ($1)', [asked(env)['to']])
        answer(201, { sent: asked(env)['to'] })
      }
    end
    map('/orders') { run ->(env) { touch(pool, env) } }
    map('/health') { run ->(_env) { answer(200, { ok: true }) } }
  end
end

def serve(port)
  url = ENV.fetch('DATABASE_URL')
  events = Puma::Events.new($stderr, $stderr)
  server = Puma::Server.new(shop(Idem::Pool.new(url), Idem::Pool.new(url)), events, min_threads: 4, max_threads: 32)
  server.add_tcp_listener('127.0.0.1', port)
  thread = server.run
  puts 'ready'
  thread.join
end

def work
  url = ENV.fetch('WORKER_URL')
  mailer = Idem::Pool.new(url)
  pool = Idem::Pool.new(url)
  # At each start: the next tick stays as it is.
  pool.with { |conn| conn.exec("SELECT idem_schedule('heal', 'heal', every => '1 hour')") }
  worker = Idem::Worker.new(pool, wait: 60, lease: 10, batch: 10)
  worker.transaction('index') do |conn, job|
    # Two runs of one key can overlap. The lock puts them in order: the later one reads the later version.
    conn.exec_params('INSERT INTO indexed SELECT id, version FROM orders WHERE id = $1 FOR NO KEY UPDATE' \
                     ' ON CONFLICT (order_id) DO UPDATE SET version = excluded.version', [job.payload['order']])
  end
  worker.transaction('heal') { |conn, _job| conn.exec('SELECT enqueue_stale_orders()') }
  worker.leased('mail') do |job|
    raise 'asked to fail' if job.attempt <= job.payload.fetch('fail', 0)

    send_mail(mailer, job.payload['to'], job.payload['gate'])
  end
  trap('TERM') do
    worker.stop
    $stdout.syswrite("stopping\n") # no buffer and no lock in a trap handler
  end
  puts 'ready'
  worker.run
end

ARGV[0] == 'serve' ? serve(Integer(ARGV[1])) : work
