# frozen_string_literal: true

# The Idempotency-Key header for Rack (draft-ietf-httpapi-idempotency-key-header-07), on top of idem.rb.
#
#   map '/charges' do
#     use Idem::HTTP, POOL, scope: ->(env) { customer_of(env) }
#     run ->(env) { conn = env['idem.conn'] ... [201, headers, [body]] }   # conn: the transaction of the key
#   end
#
# The answer is sent after the COMMIT. An error is a 500, and nothing is stored. Raise
# Idem::Refusal.new([402, headers, [body]]) to undo the work and store that answer.
#
# With `use Idem::HTTP, POOL, scope: …, lease: 10, call: ->(env, lease) { ... }`, the call happens first, outside of any
# transaction, with the key in env['idem.key']. The application then records what came of it: env['idem.outcome'].

require 'digest'
require 'stringio'
require_relative 'idem'

module Idem
  class HTTP
    # A structured-field string, or (many clients send that) the bare key; at most 1024 bytes, as idem allows.
    QUOTED = /\A"((?:[ !#-\[\]-~]|\\["\\])*)"\z/n.freeze
    BARE = /\A[!#-\[\]-~]+\z/n.freeze

    # The key, or nil if the header is not valid.
    def self.parse_key(header)
      header = header.b # Latin-1 bytes are no UTF-8: compare bytes
      key = (m = QUOTED.match(header)) ? m[1].gsub(/\\(.)/n, '\1') : header[BARE]
      key.force_encoding(Encoding::UTF_8) if key && key.bytesize.between?(1, 1024)
    end

    MAX_BODY = 1 << 20 # a larger one gets 413

    # scope: ->(env) { the customer }, so that keys of two customers never meet; nil if the program has only one.
    # A wait keeps a connection.
    def initialize(app, pool, scope:, ttl: nil, wait: 0, lease: 30, call: nil)
      @app = app
      @pool = pool
      @scope = scope
      @ttl = ttl
      @wait = wait
      @lease = lease
      @call = call
    end

    def call(env)
      header = env['HTTP_IDEMPOTENCY_KEY'] or return problem(400, 'The header Idempotency-Key is missing.')
      key = env['idem.key'] = self.class.parse_key(header) or
        return problem(400, 'The header Idempotency-Key is not valid: 1 to 1024 visible ASCII characters.')
      body = env['rack.input'].read(MAX_BODY + 1) || ''
      return problem(413, 'The body is too large.') if body.bytesize > MAX_BODY

      answer = run(env, key, body)
      reply(answer.result, answer.replayed)
    rescue Busy => e
      Idem.print_holders(@pool, key, @scope.call(env))
      problem(409, 'A request with this key is being processed.', 'Retry-After' => e.retry_after.to_s)
    rescue Stale
      problem(409, 'Another worker has taken over this request.', 'Retry-After' => '1')
    rescue Undecided => e
      Idem.print_holders(@pool, key, @scope.call(env))
      problem(409, e.message)
    rescue Mismatch
      problem(422, 'This key was used with another request.')
    rescue StandardError => e
      env['rack.errors'].puts("#{e.class}: #{e.message}")
      problem(500, 'Internal error. Ask again with the same key.')
    end

    private

    def run(env, key, body)
      # The hash of the body, not the body: any bytes will do, and jsonb does not change them.
      request = { method: env['REQUEST_METHOD'], path: env['SCRIPT_NAME'] + env['PATH_INFO'],
                  query: env['QUERY_STRING'], sha256: Digest::SHA256.hexdigest(body) }
      env['rack.input'] = StringIO.new(body)
      options = { scope: @scope.call(env), ttl: @ttl }
      return Idem.once(@pool, key, request, wait: @wait, **options) { |conn| application(env, conn) } unless @call

      outside = ->(lease) { packed { @call.call(env, lease) } }
      Idem.leased(@pool, key, request, outside, lease: @lease, **options) do |conn, outcome|
        env['idem.outcome'] = outcome
        application(env, conn)
      end
    end

    def application(env, conn)
      env['rack.input'].rewind # the work may run again
      env['idem.conn'] = conn
      packed { pack(@app.call(env)) }
    end

    def packed
      yield
    rescue Refusal => e
      raise Refusal, pack(e.result)
    end

    # An answer as JSON. The body is text, because jsonb would change the order of its fields.
    def pack(answer)
      status, headers, body = answer
      text = +''
      body.each { |part| text << part }
      body.close if body.respond_to?(:close)
      text = text.dup.force_encoding(Encoding::UTF_8)
      raise ArgumentError, 'the body of a stored answer must be UTF-8 text without NUL' if !text.valid_encoding? || text.include?("\0")

      { status: status, headers: headers.to_a, body: text }
    end

    def reply(stored, replayed)
      headers = stored['headers'].to_h
      headers['Idempotent-Replayed'] = 'true' if replayed
      [stored['status'], headers, [stored['body']]]
    end

    def problem(status, title, headers = {})
      headers = { 'Content-Type' => 'application/problem+json' }.merge(headers)
      [status, headers, [{ title: title, status: status }.to_json]]
    end
  end
end
