// The Idempotency-Key header for Express (draft-ietf-httpapi-idempotency-key-header-07), on top of idem.mjs.
//
//   app.use(express.json({ verify: keepBody }))
//   const idempotent = idempotency(pool, { scope: (req) => customerOf(req) })
//   app.post('/charges', idempotent.once(async (client, req) => {   // client: the transaction of the key
//     ...
//     return { status: 201, headers: {}, body: { charge_id: 1 } }   // throw new Refusal({ status: 402, … }) to undo and store it
//   }))
//
// The first answer and every repetition are sent from the same stored status, headers and body.
import { createHash } from 'node:crypto'
import { Busy, Mismatch, Refusal, Stale, Undecided, leased, once, printHolders } from './idem.mjs'

// For body parsers: the request is compared byte by byte.
export const keepBody = (req, res, bytes) => (req.rawBody = bytes)

// A structured-field string, or (many clients send that) the bare key; at most 1024 bytes, as idem allows.
export function parseKey(header) {
  const quoted = /^"((?:[ !#-[\]-~]|\\["\\])*)"$/.exec(header)
  const key = quoted ? quoted[1].replace(/\\(.)/g, '$1') : /^[!#-~][!-~]*$/.test(header) ? header : ''
  return key.length >= 1 && key.length <= 1024 ? key : null
}

function problem(res, status, title, headers = {}) {
  res.writeHead(status, { 'Content-Type': 'application/problem+json', ...headers })
  res.end(JSON.stringify({ title, status }))
}

// The body is stored as text, because jsonb would change the order of its fields.
function pack({ status = 200, headers = {}, body = '' }) {
  if (typeof body === 'string') return { status, headers, body }
  return { status, headers: { 'Content-Type': 'application/json', ...headers }, body: JSON.stringify(body) }
}

async function packed(answer) {
  try {
    return pack(await answer)
  } catch (error) {
    throw error instanceof Refusal ? new Refusal(pack(error.result)) : error
  }
}

function fingerprint(req) {
  if (!req.rawBody && Number(req.headers['content-length'] ?? 0) > 0) {
    throw new Error(`no body parser with keepBody has read this body; its Content-Type is ${req.headers['content-type']}`)
  }
  const sha256 = createHash('sha256').update(req.rawBody ?? '').digest('hex')
  return { method: req.method, path: req.originalUrl, sha256 }
}

// scope(req): the customer, so that keys of two customers never meet; null if the program has only one. wait > 0 keeps a
// connection while it waits. The body parser limits the size of a body.
export function idempotency(pool, { scope, ttl = null, wait = '0' } = {}) {
  if (typeof scope !== 'function') throw new TypeError('idempotency() needs a scope: (req) => the customer')
  const wrap = (run) => async (req, res) => {
    const header = req.headers['idempotency-key']
    if (header === undefined) return problem(res, 400, 'The header Idempotency-Key is missing.')
    const key = parseKey(header)
    if (key === null) {
      return problem(res, 400, 'The header Idempotency-Key is not valid: 1 to 1024 visible ASCII characters.')
    }
    let answer
    try {
      answer = await run(req, key, fingerprint(req))
    } catch (error) {
      if (error instanceof Busy || error instanceof Undecided) await printHolders(pool, key, scope(req))
      if (error instanceof Busy) {
        return problem(res, 409, 'A request with this key is being processed.', { 'Retry-After': error.retryAfter })
      }
      if (error instanceof Stale) {
        return problem(res, 409, 'Another worker has taken over this request.', { 'Retry-After': 1 })
      }
      if (error instanceof Undecided) {
        return problem(res, 409, 'The outcome of this request is unknown: an operator has to decide.')
      }
      if (error instanceof Mismatch) return problem(res, 422, 'This key was used with another request.')
      throw error // Express answers 500
    }
    const { status, headers, body } = answer.result
    res.writeHead(status, answer.replayed ? { ...headers, 'Idempotent-Replayed': 'true' } : headers)
    res.end(body)
  }
  return {
    // For handlers that work in the database: handler(client, req).
    once: (handler) =>
      wrap((req, key, request) =>
        once(pool, key, request, (client) => packed(handler(client, req)), { scope: scope(req), ttl, wait }),
      ),
    // For handlers that call the outside world: call(lease, req, key) does that, handler(client, req, outcome) records it.
    leased: (call, handler, { lease = 30 } = {}) =>
      wrap((req, key, request) =>
        leased(
          pool, key, request,
          (held) => call(held, req, key).catch((e) => packed(Promise.reject(e))),
          (client, outcome) => packed(handler(client, req, outcome)),
          { lease, scope: scope(req), ttl },
        ),
      ),
  }
}
