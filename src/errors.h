/*
 * errors.h
 *		SQLSTATEs of idem's own.
 *
 * Class ID is free for applications by the SQL standard (classes that begin
 * with I to Z are left to implementations) and not used by PostgreSQL.
 */
#ifndef IDEM_ERRORS_H
#define IDEM_ERRORS_H

/* the key was used with another request, or for another handler */
#define ERRCODE_IDEM_REQUEST_MISMATCH MAKE_SQLSTATE('I', 'D', '0', '0', '1')
/* this transaction does not hold the key */
#define ERRCODE_IDEM_NOT_HELD MAKE_SQLSTATE('I', 'D', '0', '0', '2')
/* somebody took over, or the token was never handed out for this key */
#define ERRCODE_IDEM_STALE_TOKEN MAKE_SQLSTATE('I', 'D', '0', '0', '3')
/* the key is finished, with another result than the one given */
#define ERRCODE_IDEM_ALREADY_FINISHED MAKE_SQLSTATE('I', 'D', '0', '0', '4')
/* a job with this key is there, and the caller wants to be told so by an error */
#define ERRCODE_IDEM_DUPLICATE_JOB MAKE_SQLSTATE('I', 'D', '0', '0', '5')
/* the transaction has claimed keys and not finished them, and that is to be an error */
#define ERRCODE_IDEM_UNFINISHED MAKE_SQLSTATE('I', 'D', '0', '0', '7')

#endif /* IDEM_ERRORS_H */
