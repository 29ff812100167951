/*
 * hash.c
 *		The hash of a name in a name space: of a key in its scope or queue.  And a hash
 *		with a secret key, which is not stored.
 *
 * It is SipHash-2-4 (Aumasson and Bernstein, 2012) with a fixed key, over the
 * length of the name space as four bytes, the name space and the name, in UTF-8.  Bytes
 * become words in little-endian order on every machine, because the hash is
 * stored: dump, restore, pg_upgrade and logical replication carry it to other
 * machines.  For the same reason the SipHash key cannot differ between databases,
 * so it is not a secret.  Even so, finding many names with one hash is expensive,
 * unlike with hashes that are made for speed alone.
 *
 * Equal hashes do not prove equal names: callers compare the names as well.
 */
#include "postgres.h"

#include "port/pg_bswap.h"

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

/* Append up to eight bytes, which are the low bytes of the word */
static inline void
sip_append(SipState *sip, uint64 bytes, int n)
{
	int used = sip->nbytes % 8;

	sip->word |= bytes << (8 * used);
	sip->nbytes += n;
	if (used + n < 8)
		return;
	sip_word(sip, sip->word);
	/* a shift by 64 bits is undefined, so shift in two steps */
	sip->word = bytes >> (8 * (7 - used)) >> 8;
}

static void
sip_text(SipState *sip, const char *bytes, Size len)
{
	uint64 word;

	for (; len >= sizeof(word); len -= sizeof(word), bytes += sizeof(word))
	{
		memcpy(&word, bytes, sizeof(word));
#ifdef WORDS_BIGENDIAN
		word = pg_bswap64(word);
#endif
		sip_append(sip, word, sizeof(word));
	}
	for (; len > 0; len--, bytes++)
		sip_append(sip, (unsigned char) *bytes, 1);
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

static bool
is_ascii(const char *bytes, Size len)
{
	for (Size i = 0; i < len; i++)
	{
		if (IS_HIGHBIT_SET(bytes[i]))
			return false;
	}
	return true;
}

/*
 * The bytes to hash: those of UTF-8, so that a dump restored into a database with another
 * encoding, or a subscriber with another one, finds its keys.  In SQL_ASCII the server
 * knows of no characters, so the bytes are hashed as they are.
 */
static const char *
get_utf8(const text *value, Size *len)
{
	int encoding = GetDatabaseEncoding();
	char *bytes = VARDATA_ANY(value);
	char *converted;

	*len = VARSIZE_ANY_EXHDR(value);
	if (likely(encoding == PG_UTF8) || encoding == PG_SQL_ASCII || is_ascii(bytes, *len))
		return bytes;
	converted = pg_server_to_any(bytes, *len, PG_UTF8);
	*len = strlen(converted);
	return converted;
}

static void
sip_begin(SipState *sip, uint64 key_0, uint64 key_1)
{
	*sip = (SipState){
		.v0 = key_0 ^ UINT64CONST(0x736f6d6570736575),
		.v1 = key_1 ^ UINT64CONST(0x646f72616e646f6d),
		.v2 = key_0 ^ UINT64CONST(0x6c7967656e657261),
		.v3 = key_1 ^ UINT64CONST(0x7465646279746573)};
}

int64
idem_hash_name(const text *name_space, const text *name)
{
	SipState sip;
	Size len;
	const char *bytes = get_utf8(name_space, &len);

	sip_begin(&sip, SIP_KEY_0, SIP_KEY_1);
	sip_append(&sip, len, 4);
	sip_text(&sip, bytes, len);
	bytes = get_utf8(name, &len);
	sip_text(&sip, bytes, len);
	return (int64) sip_finish(&sip);
}

/* The hash of bytes as they are, with a key of the caller: for hashes that are not stored */
uint64
idem_hash_bytes(uint64 key_0, uint64 key_1, const void *bytes, Size len)
{
	SipState sip;

	sip_begin(&sip, key_0, key_1);
	sip_text(&sip, bytes, len);
	return sip_finish(&sip);
}
