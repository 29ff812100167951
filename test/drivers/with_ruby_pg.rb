# ruby-pg
require 'json'
require 'pg'

POOLED = ENV.fetch('POOLED_URL')

def fact(text, got, wanted)
  if got == wanted
    puts "ok - ruby_pg: #{text}"
  else
    puts "not ok - ruby_pg: #{text}: got #{got.inspect}, wanted #{wanted.inspect}"
    $failed = true
  end
end

def state
  yield
  'no error'
rescue PG::Error => e
  e.result&.error_field(PG::PG_DIAG_SQLSTATE) || e.class.name
end

conn = PG.connect(POOLED)
claim = 'SELECT claimed, status, result FROM idem_claim($1, request => $2, wait => $3)'
row = conn.transaction do
  row = conn.exec_params(claim, ['rb', JSON.generate({ a: 1 }), '2 s']).first
  conn.exec_params('SELECT idem_finish($1, $2)', ['rb', '{"x": 1}'])
  row
end
fact('transaction { exec_params }; strings are jsonb and interval parameters, no cast', row['status'], 'claimed')
row = conn.exec_params(claim, ['rb', JSON.generate({ a: 1 }), '0']).first
fact('without a type map every value is a string: booleans, too', row['claimed'], 'f')
fact('… and jsonb: JSON.parse() it', row['result'], '{"x": 1}')
conn.type_map_for_results = PG::BasicTypeMapForResults.new(conn)
row = conn.exec_params(claim, ['rb', JSON.generate({ a: 1 }), '0']).first
fact('BasicTypeMapForResults: booleans are true and false', row['claimed'], false)
lease = conn.exec("SELECT token, attempt FROM idem_lease('rbl', '30 s')").first
fact('BasicTypeMapForResults: a token is an Integer', lease['token'].class, Integer)
done = conn.exec_params("SELECT idem_finish('rbl', '1', $1)", [lease['token']]).getvalue(0, 0)
fact('a token as parameter needs no cast', done, true)
fact('a nil parameter is NULL', conn.exec_params("SELECT status FROM idem_claim('rb', request => $1)", [nil]).getvalue(0, 0), 'finished')
hash = conn.exec_params('SELECT $1::jsonb AS request', [{ a: 1 }]).first['request']
fact('a Hash describes a parameter (value:, type:, format:), so { a: 1 } is NULL: JSON.generate() it', hash, nil)
fact('SQLSTATE: error.result.error_field(PG::PG_DIAG_SQLSTATE)', state { conn.exec_params(claim, ['rb', '2', '0']) }, 'ID001')
fact('SELECT f() gives a string', conn.exec("SELECT idem_claim('rb')").getvalue(0, 0).class, String)
arrays = PG::TextEncoder::Array.new(elements_type: PG::TextEncoder::Integer.new)
beat = conn.exec_params("SELECT count(*) FROM idem_heartbeat($1, $2, '5 s')", [arrays.encode([1]), arrays.encode([2])]).getvalue(0, 0)
fact('PG::TextEncoder::Array makes array parameters', beat, 1)
conn.exec("SELECT FROM idem_enqueue('rbw')")
fact('CALL idem_wait returns a row', conn.exec_params('CALL idem_wait($1, $2)', ['rbw', '30 s']).first, { 'ready' => true })
fact('CALL idem_wait in a transaction: 25001', state { conn.transaction { conn.exec("CALL idem_wait('rbw')") } }, '25001')
conn.send_query("CALL idem_wait('rbnone', '60 s')")
conn.cancel until conn.block(0.1)
fact('conn.cancel ends a wait', state { conn.get_last_result }, '57014')
conn.exec('BEGIN')
conn.exec("SELECT FROM idem_claim('rb3')")
state { conn.exec('SELECT 1 / 0') }
fact('idem_finish in a failed transaction: 25P02', state { conn.exec("SELECT idem_finish('rb3')") }, '25P02')
fact('COMMIT of a failed transaction: cmd_status is ROLLBACK, no error', conn.exec('COMMIT').cmd_status, 'ROLLBACK')
swallowed = state do
  conn.transaction do
    conn.exec("SELECT FROM idem_claim('rb4')")
    state { conn.exec('SELECT 1 / 0') }
  end
end
fact('an error that was swallowed: transaction { } ends without error', swallowed, 'no error')
fact('… and the claim is gone', conn.exec("SELECT status FROM idem_get('rb4')").ntuples, 0)
fact('exec_params has no name: works behind pgbouncer', (1..20).map { state { conn.exec_params(claim, ['rb', nil, '0']) } }.uniq, ['no error'])
conn.prepare('one', 'SELECT 1')
other = PG.connect(POOLED)
other.exec('BEGIN') # takes the server connection that was used last
other.exec('SELECT 1')
fact('prepare and exec_prepared behind pgbouncer fail', state { conn.exec_prepared('one') } != 'no error', true)
other.close
exit 1 if $failed
