import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.Executors;
import javax.sql.DataSource;
import org.postgresql.ds.PGSimpleDataSource;

/**
 * The example program: a shop that charges, mails and indexes each order once.
 *
 * <p>App serve PORT | App work; DATABASE_URL and WORKER_URL name the database.
 */
public final class App {
	/** It opens a connection per use: pgbouncer is the pool. Without pgbouncer use HikariCP, say. */
	static DataSource open(String url) {
		URI uri = URI.create(url);
		String[] user = (uri.getUserInfo() + ":").split(":", -1);
		PGSimpleDataSource source = new PGSimpleDataSource();
		source.setServerNames(new String[] {uri.getHost()});
		source.setPortNumbers(new int[] {uri.getPort()});
		source.setDatabaseName(uri.getPath().substring(1));
		source.setUser(user[0]);
		source.setPassword(user[1]);
		source.setPrepareThreshold(0); // pgbouncer in transaction mode: no prepared statements
		return source;
	}

	static PreparedStatement prepare(Connection conn, String sql, Object... args) throws SQLException {
		PreparedStatement statement = conn.prepareStatement(sql);
		for (int i = 0; i < args.length; i++) {
			statement.setObject(i + 1, args[i]);
		}
		return statement;
	}

	static void execute(Connection conn, String sql, Object... args) throws SQLException {
		try (PreparedStatement statement = prepare(conn, sql, args)) {
			statement.execute();
		}
	}

	/** It stands for a mail server: a connection of its own, in autocommit. */
	static void sendMail(DataSource mailer, Object to, Object gate) throws SQLException {
		try (Connection conn = mailer.getConnection()) {
			execute(conn, "INSERT INTO outside (what) VALUES ('mail:' || ?)", to);
			if (gate != null) {
				execute(conn, "SELECT pg_advisory_lock(?), pg_advisory_unlock(?)", gate, gate);
			}
		}
	}

	static IdemHttp.Response charge(Connection tx, IdemHttp.Request request) throws Exception {
		Map<String, Object> asked = Json.object(request.text());
		long id;
		try (PreparedStatement insert = prepare(tx, "INSERT INTO charges (order_id, cents) VALUES (?, ?) RETURNING id",
				asked.get("order"), asked.get("cents"))) {
			ResultSet rows = insert.executeQuery();
			rows.next();
			id = rows.getLong(1);
		}
		if (asked.get("gate") != null) {
			execute(tx, "SELECT pg_advisory_xact_lock(?)", asked.get("gate"));
		}
		switch (String.valueOf(asked.get("fail"))) {
			case "throw": throw new IllegalStateException("asked to throw");
			case "denied": execute(tx, "SELECT * FROM forbidden"); break;
			case "swallow":
				try {
					execute(tx, "SELECT * FROM forbidden");
				} catch (SQLException e) {
					// a mistake: the transaction has failed
				}
				break;
			default:
		}
		if ((Long) asked.get("cents") > 100000) {
			throw IdemHttp.Response.json(402, Map.of("error", "too much")).refusal();
		}
		Map<String, Object> body = new LinkedHashMap<>(); // Map.of has no order
		body.put("order", asked.get("order"));
		body.put("charge_id", id);
		body.put("cents", asked.get("cents"));
		return IdemHttp.Response.json(201, body).header("Location", "/charges/" + id);
	}

	static void touch(DataSource pool, HttpExchange exchange) throws IOException {
		try (exchange) {
			long order = Long.parseLong(exchange.getRequestURI().getPath().replaceAll("\\D", ""));
			Map<String, Object> asked = Json.object(new String(exchange.getRequestBody().readAllBytes(), StandardCharsets.UTF_8));
			boolean rollback = Boolean.TRUE.equals(asked.get("rollback"));
			long job = touch(pool, order, rollback);
			String state = "done";
			if (!rollback && asked.get("wait") != null) {
				double seconds = Double.parseDouble(asked.get("wait").toString());
				state = Idem.waitForJob(pool, job, Duration.ofMillis((long) (seconds * 1000)));
			}
			boolean ended = state.equals("done") || state.equals("gone");
			exchange.sendResponseHeaders(rollback ? 409 : ended ? 200 : 202, -1);
		} catch (SQLException e) {
			System.err.println(e);
			exchange.sendResponseHeaders(500, -1);
		}
	}

	/** Returns the number of the job. */
	static long touch(DataSource pool, long order, boolean rollback) throws SQLException {
		try (Connection conn = pool.getConnection()) {
			conn.setAutoCommit(false);
			execute(conn, "UPDATE orders SET version = version + 1 WHERE id = ?", order);
			long job;
			try (PreparedStatement enqueue = prepare(conn, "SELECT job_id FROM idem_enqueue('index', ?::jsonb, key => ?)",
					"{\"order\": " + order + "}", "order:" + order)) {
				ResultSet rows = enqueue.executeQuery();
				rows.next();
				job = rows.getLong(1);
			}
			if (rollback) {
				conn.rollback();
			} else {
				conn.commit();
			}
			return job;
		}
	}

	static void serve(int port) throws IOException {
		DataSource pool = open(System.getenv("DATABASE_URL"));
		IdemHttp shop = new IdemHttp(pool, exchange -> exchange.getRequestHeaders().getFirst("X-Customer"), // stands for a login
			null, Duration.ZERO);
		HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", port), 0);
		server.createContext("/charges", shop.once(App::charge));
		server.createContext("/mails", shop.leased(Duration.ofSeconds(10), (lease, request) -> {
			Map<String, Object> asked = Json.object(request.text());
			sendMail(pool, asked.get("to"), asked.get("gate"));
			return asked.get("to");
		}, (tx, to, request) -> {
			execute(tx, "INSERT INTO sent (recipient) VALUES (?)", to);
			return IdemHttp.Response.json(201, Map.of("sent", to));
		}));
		server.createContext("/orders", exchange -> touch(pool, exchange));
		server.createContext("/health", exchange -> {
			exchange.sendResponseHeaders(200, -1);
			exchange.close();
		});
		server.setExecutor(Executors.newFixedThreadPool(32));
		server.start();
		System.out.println("ready");
	}

	static void work() throws Exception {
		DataSource pool = open(System.getenv("WORKER_URL"));
		try (Connection conn = pool.getConnection()) { // at each start: the next tick stays as it is
			execute(conn, "SELECT idem_schedule('heal', 'heal', every => '1 hour')");
		}
		IdemWorker worker = new IdemWorker(pool, Duration.ofMinutes(1), Duration.ofSeconds(10), 10);
		// Two runs of one key can overlap. The lock puts them in order: the later one reads the later version.
		worker.transaction("index", (tx, job) -> execute(tx, "INSERT INTO indexed SELECT id, version FROM orders WHERE id = ?"
			+ " FOR NO KEY UPDATE ON CONFLICT (order_id) DO UPDATE SET version = excluded.version", Json.object(job.payload()).get("order")));
		worker.transaction("heal", (tx, job) -> execute(tx, "SELECT enqueue_stale_orders()"));
		worker.leased("mail", job -> {
			Map<String, Object> mail = Json.object(job.payload());
			if (job.attempt() <= (Long) mail.getOrDefault("fail", 0L)) {
				throw new IllegalStateException("asked to fail");
			}
			sendMail(pool, mail.get("to"), mail.get("gate"));
		});
		Thread main = Thread.currentThread();
		Runtime.getRuntime().addShutdownHook(new Thread(() -> {
			worker.stop();
			System.out.println("stopping");
			try {
				main.join();
			} catch (InterruptedException e) {
				// end now
			}
			Runtime.getRuntime().halt(0); // else the status is 143
		}));
		System.out.println("ready");
		worker.run();
	}

	public static void main(String[] args) throws Exception {
		if (args[0].equals("serve")) {
			serve(Integer.parseInt(args[1]));
		} else {
			work();
		}
	}
}
