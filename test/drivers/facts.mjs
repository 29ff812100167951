// For the JavaScript scripts of test/drivers: state a fact, and compare it with what the driver does.
import assert from 'node:assert/strict'
import { basename } from 'node:path'

export const url = process.env.POOLED_URL
const driver = basename(process.argv[1]).slice('with_'.length, -'.mjs'.length)

export function fact(text, got, wanted) {
  try {
    assert.deepEqual(got, wanted)
    console.log(`ok - ${driver}: ${text}`)
  } catch {
    console.log(`not ok - ${driver}: ${text}: got ${JSON.stringify(got)}, wanted ${JSON.stringify(wanted)}`)
    process.exitCode = 1
  }
}

// What where(error) finds in the error that fn throws
export async function state(fn, where = (error) => error.code) {
  try {
    await fn()
  } catch (error) {
    return where(error)
  }
  return 'no error'
}
