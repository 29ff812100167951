/*
 * hash.c
 *		The hash of a name in a name space: of a key in its scope or queue.
 *
 * It is SipHash-2-4 (Aumasson and Bernstein, 2012) with a fixed key, over the
 * length of the name space as four bytes, the name space and the name.  Bytes
 * become words in little-endian order on every machine, because the hash is
 * stored: dump, restore, pg_upgrade and logical replication carry it to other
 * machines.  For the same reason the SipHash key cannot differ between databases,
 * so it is not a secret.  Even so, finding many names with one hash is expensive,
 * unlike with hashes that are made for speed alone.
 *
 * Equal hashes do not prove equal names: callers compare the names as well.
 */
#include "postgres.h"

#include "idem.h"

/* "idem.key" and "_hash.v1", as little-endian words */
#define SIP_KEY_0 UINT64CONST(0x79656b2e6d656469)
#define SIP_KEY_1 UINT64CONST(0x31762e687361685f)

typedef struct SipState
{
	uint64 v0;
	uint64 v1;
	uint64 v2;
	uint64 v3;
	uint64 word;   /* bytes that do not fill a word yet */
	uint64 nbytes; /* number of bytes so far */
} SipState;

static inline uint64
rotate_left(uint64 word, int bits)
{
	return (word << bits) | (word >> (64 - bits));
}

static inline void
sip_round(SipState *sip)
{
	sip->v0 += sip->v1;
	sip->v2 += sip->v3;
	sip->v1 = rotate_left(sip->v1, 13) ^ sip->v0;
	sip->v3 = rotate_left(sip->v3, 16) ^ sip->v2;
	sip->v0 = rotate_left(sip->v0, 32);
	sip->v2 += sip->v1;
	sip->v0 += sip->v3;
	sip->v1 = rotate_left(sip->v1, 17) ^ sip->v2;
	sip->v3 = rotate_left(sip->v3, 21) ^ sip->v0;
	sip->v2 = rotate_left(sip->v2, 32);
}

static inline void
sip_word(SipState *sip, uint64 word)
{
	sip->v3 ^= word;
	sip_round(sip);
	sip_round(sip);
	sip->v0 ^= word;
}

static inline void
sip_byte(SipState *sip, unsigned char byte)
{
	sip->word |= (uint64) byte << (8 * (sip->nbytes % 8));
	if (++sip->nbytes % 8 == 0)
	{
		sip_word(sip, sip->word);
		sip->word = 0;
	}
}

static void
sip_text(SipState *sip, const text *value)
{
	const unsigned char *bytes = (const unsigned char *) VARDATA_ANY(value);
	Size len = VARSIZE_ANY_EXHDR(value);

	for (Size i = 0; i < len; i++)
		sip_byte(sip, bytes[i]);
}

static uint64
sip_finish(SipState *sip)
{
	/* the last word ends with the number of bytes */
	sip_word(sip, sip->word | sip->nbytes << 56);
	sip->v2 ^= 0xff;
	for (int i = 0; i < 4; i++)
		sip_round(sip);
	return sip->v0 ^ sip->v1 ^ sip->v2 ^ sip->v3;
}

int64
idem_hash_name(const text *name_space, const text *name)
{
	SipState sip = {
		.v0 = SIP_KEY_0 ^ UINT64CONST(0x736f6d6570736575),
		.v1 = SIP_KEY_1 ^ UINT64CONST(0x646f72616e646f6d),
		.v2 = SIP_KEY_0 ^ UINT64CONST(0x6c7967656e657261),
		.v3 = SIP_KEY_1 ^ UINT64CONST(0x7465646279746573)};
	uint32 len = VARSIZE_ANY_EXHDR(name_space);

	for (int i = 0; i < 4; i++)
		sip_byte(&sip, (unsigned char) (len >> (8 * i)));
	sip_text(&sip, name_space);
	sip_text(&sip, name);
	return (int64) sip_finish(&sip);
}
