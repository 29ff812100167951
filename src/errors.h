/*
 * errors.h
 *		SQLSTATEs that only idem raises.
 *
 * The SQL standard leaves classes that begin with I to Z to implementations.
 * PostgreSQL does not use class ID.
 */
#ifndef IDEM_ERRORS_H
#define IDEM_ERRORS_H

/* the key was used with another request or another handler (K7) */
#define ERRCODE_IDEM_REQUEST_MISMATCH MAKE_SQLSTATE('I', 'D', '0', '0', '1')
/* this transaction does not hold the key, or the job was never fetched (K11) */
#define ERRCODE_IDEM_NOT_HELD MAKE_SQLSTATE('I', 'D', '0', '0', '2')
/* the token is not the last one of the key or job (L3, J11) */
#define ERRCODE_IDEM_STALE_TOKEN MAKE_SQLSTATE('I', 'D', '0', '0', '3')
/* the key is already finished: with another result, or it cannot be changed any more (K11, L3) */
#define ERRCODE_IDEM_ALREADY_FINISHED MAKE_SQLSTATE('I', 'D', '0', '0', '4')
/* there is a job with this key, and the caller asked for an error in that case (J1) */
#define ERRCODE_IDEM_DUPLICATE_JOB MAKE_SQLSTATE('I', 'D', '0', '0', '5')
/* the slot of the key or job belongs to another database (M2) */
#define ERRCODE_IDEM_OTHER_SHARD MAKE_SQLSTATE('I', 'D', '0', '0', '6')
/* the transaction has not finished the keys that it claimed (K14) */
#define ERRCODE_IDEM_UNFINISHED MAKE_SQLSTATE('I', 'D', '0', '0', '7')

#endif /* IDEM_ERRORS_H */
