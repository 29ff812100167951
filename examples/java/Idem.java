import java.net.InetAddress;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.ThreadLocalRandom;
import javax.sql.DataSource;

/**
 * Runs work once per idempotency key, with the PostgreSQL extension idem and JDBC.
 *
 * <p>once: the work is in the database. Key, work and result commit in one transaction. leased: the work leaves the
 * database (a mail, a card). A lease keeps others out, a token keeps a late worker out.
 *
 * <p>Requests and results are JSON as text. Behind pgbouncer in transaction mode set prepareThreshold=0: by default
 * pgjdbc prepares a statement that it runs for the fifth time. The pool is any DataSource.
 */
public final class Idem {
	private Idem() {}

	/** Another request with this key runs now. Ask again after that many seconds. */
	public static final class Busy extends Exception {
		public final long retryAfter;

		Busy(long seconds) {
			super("another request with this key is being processed");
			retryAfter = Math.max(1, seconds);
		}
	}

	/** The key was used with another request (ID001). */
	public static final class Mismatch extends Exception {}

	/** Another worker has taken over (ID003). Nothing of this attempt was stored. */
	public static final class Stale extends Exception {}

	/** The key is parked or exhausted: an operator has to decide. */
	public static final class Undecided extends Exception {}

	/** Throw it in a call if nothing has happened outside: the lease is released at once. */
	public static final class NotDone extends Exception {
		public NotDone(Throwable cause) { super(cause); }
	}

	/** Throw it in the work: its changes are rolled back, and the result is stored like any other. */
	public static final class Refusal extends Exception {
		public final String result;

		public Refusal(String result) { this.result = result; }
	}

	/** The work, in the transaction of the key; it returns JSON. It neither commits nor rolls back. */
	public interface Work { String run(Connection tx) throws Exception; }

	/** The call of leased: outside of any transaction. Interrupted if another worker takes over. */
	public interface Call<T> { T run(Lease lease) throws Exception; }

	public interface Recorder<T> { String run(Connection tx, T outcome) throws Exception; }

	public record Lease(long token, int attempt, String checkpoint) {}

	public record Answer(String result, boolean replayed) {}

	/** Null: the defaults of idem; no request: it is not compared. A wait keeps a connection of the pool. */
	public record Key(String key, String request, String scope, Duration ttl, Duration waitFor) {
		public Key(String key, String request) { this(key, request, null, null, Duration.ZERO); }
	}

	public static Answer once(DataSource pool, Key key, Work work) throws Exception {
		return again(pool, tx -> {
			// One round trip: the driver sends BEGIN with the first statement, and both statements together. The
			// savepoint comes after the claim, so that a refusal can be stored.
			Row row = ask(tx, "SELECT status, result::text, NULL::bigint, NULL::int, NULL::text, NULL::bigint"
				+ " FROM idem_claim(?, request => ?::jsonb, ttl => ?::interval, wait => ?::interval, scope => ?);"
				+ " SAVEPOINT idem_work", key.key, key.request, text(key.ttl), text(key.waitFor), key.scope);
			if (!row.claimed()) {
				return row.replay();
			}
			String result;
			try {
				result = work.run(tx);
			} catch (Refusal refusal) {
				execute(tx, "ROLLBACK TO SAVEPOINT idem_work");
				result = refusal.result;
			}
			return finish(tx, key, result, null);
		});
	}

	/**
	 * The call outside of any transaction, then record in the transaction that finishes the key. The lease is renewed
	 * while the call runs. The call may happen twice: pass the key on to the other side.
	 */
	public static <T> Answer leased(DataSource pool, Key key, Duration lease, Call<T> call, Recorder<T> record) throws Exception {
		// The name is new for each call: two calls with the same name would share the lease. If the answer is lost,
		// the second try gets the same lease again.
		String worker = InetAddress.getLocalHost().getHostName() + ":" + UUID.randomUUID();
		Row row = autocommit(pool, "SELECT status, result::text, token, attempt, checkpoint::text,"
			+ " ceil(extract(epoch FROM lease_until - clock_timestamp()))::bigint"
			+ " FROM idem_lease(?, ?::interval, request => ?::jsonb, ttl => ?::interval, worker => ?, scope => ?)",
			key.key, text(lease), key.request, text(key.ttl), worker, key.scope);
		if (!row.claimed()) {
			return row.replay();
		}
		try {
			T outcome;
			// The renewal ends before the fence: a renewal from another session would wait for the fence.
			Heartbeat heartbeat = new Heartbeat(lease, () -> autocommit(pool, "SELECT idem_renew(?, ?, ?::interval, ?)",
				key.key, row.token, text(lease), key.scope));
			try {
				outcome = call.run(new Lease(row.token, row.attempt, row.checkpoint));
			} finally {
				heartbeat.stop();
			}
			return fenced(pool, key, row.token, tx -> record.run(tx, outcome));
		} catch (Refusal refusal) {
			return fenced(pool, key, row.token, tx -> refusal.result);
		} catch (NotDone e) {
			autocommit(pool, "SELECT idem_release(?, ?, ?)", key.key, row.token, key.scope);
			throw e;
		}
	}

	private static Answer fenced(DataSource pool, Key key, long token, Work work) throws Exception {
		try {
			return again(pool, tx -> {
				ask(tx, "SELECT idem_fence(?, ?, ?)", key.key, token, key.scope);
				return finish(tx, key, work.run(tx), token);
			});
		} catch (Finished e) { // our COMMIT happened, its answer was lost
			Row row = autocommit(pool, "SELECT status, result::text, NULL::bigint, NULL::int, NULL::text, NULL::bigint"
				+ " FROM idem_get(?, ?)", key.key, key.scope);
			return new Answer(row.replay().result, false);
		}
	}

	// commit() of a transaction that has failed raises no error (seen with pgjdbc 42.5), although the server answers
	// ROLLBACK. So idem_finish is the last statement before it: in a failed transaction it raises 25P02.
	private static Answer finish(Connection tx, Key key, String result, Long token) throws Exception {
		ask(tx, "SELECT idem_finish(?, ?::jsonb, ?::bigint, ?)", key.key, result, token, key.scope);
		tx.commit();
		return new Answer(result, false);
	}

	private record Row(String status, String result, long token, int attempt, String checkpoint, long seconds) {
		boolean claimed() { return status.equals("claimed") || status.equals("resumed"); }

		Answer replay() throws Busy, Undecided {
			switch (status) {
				case "finished": return new Answer(result, true);
				case "busy": throw new Busy(seconds);
				default: throw new Undecided();
			}
		}
	}

	/** The key is finished (ID004). */
	private static final class Finished extends Exception {}

	interface Task<T> { T run(Connection conn) throws Exception; }

	/**
	 * The task in a transaction, once more if the connection was lost or the server asks for it (40001, 40P01). A
	 * COMMIT without an answer may have happened. The key knows, and the task asks it first, each time.
	 */
	static <T> T again(DataSource pool, Task<T> task) throws Exception {
		for (int n = 1; ; n++) {
			boolean lost = true;
			try (Connection conn = pool.getConnection()) {
				conn.setAutoCommit(false);
				try {
					T result = task.run(conn);
					conn.rollback(); // nothing is sent after a commit
					conn.setAutoCommit(true);
					return result;
				} catch (Exception e) {
					lost = !conn.isValid(5); // not the SQLSTATE: the work may have used another connection, too
					if (!lost) {
						conn.rollback();
						conn.setAutoCommit(true);
					}
					throw e;
				}
			} catch (SQLException e) {
				boolean retry = lost || "40001".equals(e.getSQLState()) || "40P01".equals(e.getSQLState());
				if (!retry || n == 8) {
					throw e;
				}
			}
			Thread.sleep((long) (ThreadLocalRandom.current().nextDouble(0.5, 1) * Math.min(2000, 50L << n)));
		}
	}

	/** One function of idem, in a transaction of its own. */
	static Row autocommit(DataSource pool, String sql, Object... args) throws Exception {
		return again(pool, tx -> {
			Row row = ask(tx, sql, args);
			tx.commit();
			return row;
		});
	}

	/** For a key that is busy: who holds it, if this role may know. One line for each holder. */
	public static void printHolders(DataSource pool, Key key) throws SQLException {
		String lines = first(pool, "SELECT string_agg(concat_ws(', ', 'key held by ' || kind, 'process ' || pid,"
			+ " 'worker ' || worker, 'since ' || since) || ': ' || detail, chr(10)) FROM idem_holder(?, ?)", key.key, key.scope);
		if (lines != null) {
			System.out.println(lines);
		}
	}

	/** Waits until the job has ended. Returns its state; if the time is over, prints why the job has not ended. */
	public static String waitForJob(DataSource pool, long job, Duration timeout) throws SQLException {
		String state = first(pool, "CALL idem_wait_job(?, ?::interval)", job, text(timeout));
		if (!List.of("done", "dead", "cancelled", "gone").contains(state)) { // gone: done, and its queue does not keep it
			System.out.println(first(pool, "SELECT string_agg(concat_ws(', ', format('job %s %s', ?::bigint, reason),"
				+ " 'process ' || pid, 'since ' || since) || ': ' || detail, chr(10)) FROM idem_why(?)", job, job));
		}
		return state;
	}

	/** The first column of the first row, in autocommit: the session has no transaction while it waits. */
	private static String first(DataSource pool, String sql, Object... args) throws SQLException {
		try (Connection conn = pool.getConnection(); PreparedStatement statement = conn.prepareStatement(sql)) {
			for (int i = 0; i < args.length; i++) {
				statement.setObject(i + 1, args[i]);
			}
			statement.execute();
			try (ResultSet rows = statement.getResultSet()) {
				return rows.next() ? rows.getString(1) : null;
			}
		}
	}

	/** Calls a function of idem. Only its errors get a meaning: the same SQLSTATE from the work stays what it is. */
	static Row ask(Connection tx, String sql, Object... args) throws Exception {
		try (PreparedStatement statement = tx.prepareStatement(sql)) {
			for (int i = 0; i < args.length; i++) {
				statement.setObject(i + 1, args[i]);
			}
			statement.execute();
			try (ResultSet rows = statement.getResultSet()) {
				if (!rows.next() || rows.getMetaData().getColumnCount() < 6) {
					return null;
				}
				return new Row(rows.getString(1), rows.getString(2), rows.getLong(3), rows.getInt(4), rows.getString(5), rows.getLong(6));
			}
		} catch (SQLException e) {
			switch (String.valueOf(e.getSQLState())) {
				case "ID001": throw new Mismatch();
				case "ID003": throw new Stale();
				case "ID004": throw new Finished();
				default: throw e;
			}
		}
	}

	static void execute(Connection tx, String sql) throws SQLException {
		try (Statement statement = tx.createStatement()) {
			statement.execute(sql);
		}
	}

	/** Intervals travel as text, with a cast in the statement. */
	static String text(Duration d) { return d == null ? null : d.toMillis() + " ms"; }

	interface Beat { void run() throws Exception; }

	/** Renews a lease every third of it, in a thread of its own; interrupts the worker if the lease is lost. */
	static final class Heartbeat {
		private boolean ended;
		private boolean lost;

		Heartbeat(Duration lease, Beat beat) {
			Thread worker = Thread.currentThread();
			Thread thread = new Thread(() -> run(lease.toMillis() / 3, beat, worker));
			thread.setDaemon(true);
			thread.start();
		}

		private synchronized void run(long every, Beat beat, Thread worker) {
			while (!ended) {
				try {
					wait(every);
					if (!ended) {
						beat.run();
					}
				} catch (Stale e) {
					lost = ended = true;
					worker.interrupt();
				} catch (Exception e) {
					// says nothing about the lease: again
				}
			}
		}

		/** Waits for a beat that runs. */
		synchronized void stop() throws Stale {
			ended = true;
			notifyAll();
			if (lost) {
				Thread.interrupted(); // the interrupt was for the call
				throw new Stale();
			}
		}
	}
}
