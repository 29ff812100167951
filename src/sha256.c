/*
 * sha256.c
 *		SHA-256 (FIPS 180-4), with less overhead for short messages.
 *
 * The server computes SHA-256 with OpenSSL, if it was built with it.  To set up a context of
 * OpenSSL takes longer than to hash a short message.  So messages of up to two blocks are
 * hashed here.  Longer ones are left to the server: if the processor has instructions for
 * SHA-256, OpenSSL uses them and is faster from the third block on.  Both give the same digest.
 */
#include "postgres.h"

#include "common/cryptohash.h"
#include "port/pg_bswap.h"

#include "idem.h"

#define BLOCK_LEN  64
#define MAX_BLOCKS 2
/* The longest message that is hashed here: the last block ends with a bit and the length */
#define MAX_SHORT (MAX_BLOCKS * BLOCK_LEN - 1 - (int) sizeof(uint64))

/* The first 32 bits of the fractional parts of the cube roots of the first 64 primes */
static const uint32 round_constants[64] = {
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
	0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
	0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
	0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
	0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
	0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
	0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
	0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static inline uint32
rotate_right(uint32 word, int bits)
{
	return (word >> bits) | (word << (32 - bits));
}

/* One round.  Afterwards d and h have new values, and each variable takes the next role. */
#define ROUND(a, b, c, d, e, f, g, h, i)                                        \
	do                                                                          \
	{                                                                           \
		h += (rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25)) + \
			((e & f) ^ (~e & g)) + round_constants[i] + words[i];               \
		d += h;                                                                 \
		h += (rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22)) + \
			((a & b) ^ (a & c) ^ (b & c));                                      \
	} while (0)

static void
hash_block(uint32 *state, const uint8 *block)
{
	uint32 words[64];
	uint32 a = state[0];
	uint32 b = state[1];
	uint32 c = state[2];
	uint32 d = state[3];
	uint32 e = state[4];
	uint32 f = state[5];
	uint32 g = state[6];
	uint32 h = state[7];

	/* the words of the block, and 48 words that follow from them */
	memcpy(words, block, BLOCK_LEN);
	for (int i = 0; i < 16; i++)
		words[i] = pg_ntoh32(words[i]);
	for (int i = 16; i < 64; i++)
	{
		uint32 w15 = words[i - 15];
		uint32 w2 = words[i - 2];

		words[i] = words[i - 16] + words[i - 7] +
			(rotate_right(w15, 7) ^ rotate_right(w15, 18) ^ (w15 >> 3)) +
			(rotate_right(w2, 17) ^ rotate_right(w2, 19) ^ (w2 >> 10));
	}
	for (int i = 0; i < 64; i += 8)
	{
		ROUND(a, b, c, d, e, f, g, h, i);
		ROUND(h, a, b, c, d, e, f, g, i + 1);
		ROUND(g, h, a, b, c, d, e, f, i + 2);
		ROUND(f, g, h, a, b, c, d, e, i + 3);
		ROUND(e, f, g, h, a, b, c, d, i + 4);
		ROUND(d, e, f, g, h, a, b, c, i + 5);
		ROUND(c, d, e, f, g, h, a, b, i + 6);
		ROUND(b, c, d, e, f, g, h, a, i + 7);
	}
	state[0] += a;
	state[1] += b;
	state[2] += c;
	state[3] += d;
	state[4] += e;
	state[5] += f;
	state[6] += g;
	state[7] += h;
}

static void
hash_short(const void *data, size_t len, uint8 *digest)
{
	/* the first 32 bits of the fractional parts of the square roots of the first 8 primes */
	uint32 state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
					   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
	uint8 padded[MAX_BLOCKS * BLOCK_LEN];
	uint64 nbits = pg_hton64((uint64) len * 8);
	size_t padded_len = TYPEALIGN(BLOCK_LEN, len + 1 + sizeof(nbits));

	Assert(padded_len <= sizeof(padded));
	memcpy(padded, data, len);
	memset(padded + len, 0, padded_len - len);
	padded[len] = 0x80;
	memcpy(padded + padded_len - sizeof(nbits), &nbits, sizeof(nbits));
	for (size_t i = 0; i < padded_len; i += BLOCK_LEN)
		hash_block(state, padded + i);
	for (int i = 0; i < 8; i++)
		state[i] = pg_hton32(state[i]);
	memcpy(digest, state, IDEM_SHA256_LEN);
}

static void
hash_long(const void *data, size_t len, uint8 *digest)
{
	pg_cryptohash_ctx *ctx = pg_cryptohash_create(PG_SHA256);

	if (pg_cryptohash_init(ctx) < 0 || pg_cryptohash_update(ctx, data, len) < 0 ||
		pg_cryptohash_final(ctx, digest, IDEM_SHA256_LEN) < 0)
		elog(ERROR, "could not compute SHA-256: %s", pg_cryptohash_error(ctx));
	pg_cryptohash_free(ctx);
}

/* Write the SHA-256 of the message to digest, which has room for IDEM_SHA256_LEN bytes */
void
idem_sha256_hash(const void *data, size_t len, uint8 *digest)
{
	if (len <= MAX_SHORT)
		hash_short(data, len, digest);
	else
		hash_long(data, len, digest);
}
