import java.net.InetAddress;
import java.net.UnknownHostException;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import javax.sql.DataSource;

/**
 * A worker for the queues of idem. A handler that throws fails the job: idem retries it with the backoff of its queue.
 * A leased job that is lost to another worker interrupts the thread of its handler. When there is nothing to do, the
 * worker waits in the server, and the commit of the next job wakes it.
 */
public final class IdemWorker {
	public record Job(long id, long token, int attempt, int maxAttempts, String queue, String payload) {}

	public interface InTransaction { void run(Connection tx, Job job) throws Exception; }

	public interface Leased { void run(Job job) throws Exception; }

	private interface Round { boolean run() throws Exception; }

	private final DataSource pool;
	private final Duration wait;
	private final Duration lease;
	private final int batch;
	private final String name;
	private final Map<String, InTransaction> inTransaction = new LinkedHashMap<>();
	private final Map<String, Leased> leased = new LinkedHashMap<>();
	private final CountDownLatch stopping = new CountDownLatch(1);
	private final Set<Statement> waiting = ConcurrentHashMap.newKeySet();

	/** wait: the longest wait for a job; lease: renewed while the handler runs; batch: leased jobs per fetch. */
	public IdemWorker(DataSource pool, Duration wait, Duration lease, int batch) throws UnknownHostException {
		this.pool = pool;
		this.wait = wait;
		this.lease = lease;
		this.batch = batch;
		this.name = InetAddress.getLocalHost().getHostName() + ":" + ProcessHandle.current().pid();
	}

	/** Job and work commit together. */
	public void transaction(String queue, InTransaction handler) { inTransaction.put(queue, handler); }

	/** The work leaves the database. */
	public void leased(String queue, Leased handler) { leased.put(queue, handler); }

	public void stop() { stopping.countDown(); }

	/** Returns after stop(): it ends what runs, and gives back jobs that it has not begun. */
	public void run() throws InterruptedException {
		// One thread per mode, so that a slow call outside does not keep the other queues waiting.
		List<Thread> loops = new ArrayList<>();
		if (!inTransaction.isEmpty()) {
			loops.add(new Thread(() -> loop(this::one, inTransaction.keySet())));
		}
		if (!leased.isEmpty()) {
			loops.add(new Thread(() -> loop(this::several, leased.keySet())));
		}
		loops.forEach(Thread::start);
		for (Thread loop : loops) {
			while (loop.isAlive()) {
				loop.join(100);
				if (stopped()) {
					endWaits();
				}
			}
		}
	}

	private boolean stopped() { return stopping.getCount() == 0; }

	private void loop(Round round, Collection<String> queues) {
		while (!stopped()) {
			try {
				if (!round.run()) {
					await(queues);
				}
			} catch (Throwable e) {
				System.err.println("worker: " + e); // the server is away, say: try again, with jitter
				pause(ThreadLocalRandom.current().nextLong(500, 1500));
			}
		}
	}

	private void pause(long milliseconds) {
		try {
			stopping.await(milliseconds, TimeUnit.MILLISECONDS);
		} catch (InterruptedException e) {
			stop();
		}
	}

	/** Until a commit lets a job go. In autocommit, because the session has no transaction while it waits. */
	private void await(Collection<String> queues) throws SQLException {
		try (Connection connection = pool.getConnection();
				PreparedStatement statement = connection.prepareStatement("CALL idem_wait_any(?, ?::interval)")) {
			connection.setAutoCommit(true);
			statement.setArray(1, connection.createArrayOf("text", queues.toArray()));
			statement.setString(2, Idem.text(wait));
			waiting.add(statement);
			try {
				if (!stopped()) {
					statement.execute();
				}
			} finally {
				waiting.remove(statement);
			}
		} catch (SQLException e) {
			if (!stopped()) { // 57014 is statement_timeout: shorter than the wait
				throw e;
			}
		}
	}

	/** Called again and again: a cancel may come before the server has the statement. */
	private void endWaits() {
		for (Statement statement : waiting) {
			try {
				statement.cancel();
			} catch (SQLException e) {
				// the server is away: so is the wait
			}
		}
	}

	private List<Job> fetch(Connection tx, Collection<String> queues, int batch, String lease, int limit) throws SQLException {
		List<String> order = new ArrayList<>(queues);
		Collections.shuffle(order); // a full queue does not starve the others
		try (PreparedStatement statement = tx.prepareStatement("SELECT f.* FROM unnest(?::text[]) AS q,"
				+ " LATERAL idem_fetch(q, batch => ?, lease => ?::interval, worker => ?) AS f LIMIT ?")) {
			statement.setArray(1, tx.createArrayOf("text", order.toArray()));
			statement.setInt(2, batch);
			statement.setString(3, lease);
			statement.setString(4, name);
			statement.setInt(5, limit);
			List<Job> jobs = new ArrayList<>();
			try (ResultSet rows = statement.executeQuery()) {
				while (rows.next()) {
					jobs.add(new Job(rows.getLong("job_id"), rows.getLong("token"), rows.getInt("attempt"),
						rows.getInt("max_attempts"), rows.getString("queue"), rows.getString("payload")));
				}
			}
			return jobs;
		}
	}

	/** Fetch, work and complete in one transaction: a crash gives the job back. */
	private boolean one() throws Exception {
		return Idem.again(pool, tx -> {
			List<Job> jobs = fetch(tx, inTransaction.keySet(), 1, "0", 1);
			if (jobs.isEmpty()) {
				return false;
			}
			Job job = jobs.get(0);
			Idem.execute(tx, "SAVEPOINT idem_work");
			try {
				inTransaction.get(job.queue).run(tx, job);
				Idem.ask(tx, "SELECT idem_complete(?, ?)", job.id, job.token);
			} catch (Throwable e) {
				// A plain ROLLBACK would undo the fetch, too: no attempt counted, no backoff. If the connection is
				// lost, this throws, and the job is back in its queue.
				Idem.execute(tx, "ROLLBACK TO SAVEPOINT idem_work");
				Idem.ask(tx, "SELECT idem_fail(?, ?, ?)", job.id, job.token, e.toString());
			}
			tx.commit();
			return true;
		});
	}

	/** Fetch with a lease, in a transaction of its own. No transaction is open during the work. */
	private boolean several() throws Exception {
		List<Job> jobs = Idem.again(pool, tx -> {
			List<Job> fetched = fetch(tx, leased.keySet(), batch, Idem.text(lease), Integer.MAX_VALUE);
			tx.commit();
			return fetched;
		});
		for (int i = 0; i < jobs.size(); i++) {
			if (stopped()) { // not begun: give it back, the attempt does not count
				end(jobs.get(i), "SELECT idem_snooze(?, ?, '0')");
			} else {
				call(jobs.get(i), jobs.subList(i, jobs.size()), i > 0);
			}
		}
		return !jobs.isEmpty();
	}

	/** Meanwhile the heartbeat extends the lease of the job and of those that wait behind it. */
	private void call(Job job, List<Job> held, boolean late) throws Exception {
		Throwable failure = null;
		try {
			if (late) {
				beat(held); // it waited behind another job: is it still ours?
			}
			Idem.Heartbeat heartbeat = new Idem.Heartbeat(lease, () -> beat(held));
			try {
				leased.get(job.queue).run(job);
			} catch (Throwable e) {
				failure = e;
			} finally {
				heartbeat.stop();
			}
		} catch (Idem.Stale e) {
			System.err.println("worker: job " + job.id + ": another worker has it");
			return;
		}
		if (failure == null) {
			end(job, "SELECT idem_complete(?, ?)");
		} else {
			end(job, "SELECT idem_fail(?, ?, ?)", failure.toString());
		}
	}

	private void beat(List<Job> held) throws Exception {
		Idem.again(pool, tx -> {
			try (PreparedStatement statement = tx.prepareStatement("SELECT status"
					+ " FROM idem_heartbeat(?::bigint[], ?::bigint[], ?::interval) ORDER BY ord")) {
				statement.setArray(1, tx.createArrayOf("bigint", held.stream().map(Job::id).toArray()));
				statement.setArray(2, tx.createArrayOf("bigint", held.stream().map(Job::token).toArray()));
				statement.setString(3, Idem.text(lease));
				ResultSet rows = statement.executeQuery();
				rows.next();
				boolean renewed = rows.getString(1).equals("renewed");
				tx.commit();
				if (!renewed) {
					throw new Idem.Stale();
				}
				return null;
			}
		});
	}

	/** Stale: another worker has the job, or an answer was lost and the job has ended. */
	private void end(Job job, String sql, Object... more) throws Exception {
		List<Object> args = new ArrayList<>(List.of(job.id, job.token));
		args.addAll(List.of(more));
		try {
			Idem.autocommit(pool, sql, args.toArray());
		} catch (Idem.Stale e) {
			System.err.println("worker: job " + job.id + ": stale");
		}
	}
}
