import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpHandler;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.sql.Connection;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.function.Function;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import javax.sql.DataSource;

/**
 * The Idempotency-Key header (draft-ietf-httpapi-idempotency-key-header-07) for the HTTP server of the JDK.
 *
 * <pre>server.createContext("/charges", new IdemHttp(pool, exchange -> customerOf(exchange), null, Duration.ZERO).once((tx, request) -> ... Response.json(201, body)));</pre>
 *
 * <p>Handlers return their answer, because it must not be sent before the COMMIT. (That is why this is not a Filter:
 * behind a Filter the handler itself writes to the exchange.) An exception is a 500, and nothing is stored. Throw
 * response.refusal() to undo the work and store that answer.
 */
public final class IdemHttp {
	public record Request(HttpExchange exchange, String key, byte[] body) {
		public String text() { return new String(body, StandardCharsets.UTF_8); }
	}

	/** Stored as JSON. The body is text in it: jsonb would change the order of its fields. */
	public record Response(int status, List<List<String>> headers, String body) {
		public static Response json(int status, Object body) {
			return new Response(status, List.of(List.of("Content-Type", "application/json")), Json.write(body));
		}

		public Response header(String name, String value) {
			List<List<String>> more = new ArrayList<>(headers);
			more.add(List.of(name, value));
			return new Response(status, more, body);
		}

		public Idem.Refusal refusal() { return new Idem.Refusal(store()); }

		String store() { return Json.write(Map.of("status", status, "headers", headers, "body", body)); }

		@SuppressWarnings("unchecked")
		static Response load(String stored) {
			Map<String, Object> map = Json.object(stored);
			return new Response(((Long) map.get("status")).intValue(), (List<List<String>>) map.get("headers"), (String) map.get("body"));
		}

		void send(HttpExchange exchange) throws IOException {
			byte[] bytes = body.getBytes(StandardCharsets.UTF_8);
			headers.forEach(h -> exchange.getResponseHeaders().add(h.get(0), h.get(1)));
			exchange.sendResponseHeaders(status, bytes.length == 0 ? -1 : bytes.length);
			exchange.getResponseBody().write(bytes);
		}
	}

	public interface Handler { Response run(Connection tx, Request request) throws Exception; }

	public interface Call<T> { T run(Idem.Lease lease, Request request) throws Exception; }

	public interface Recorder<T> { Response run(Connection tx, T outcome, Request request) throws Exception; }

	private interface Run { Idem.Answer run(Idem.Key key, Request request) throws Exception; }

	private final DataSource pool;
	private final Function<HttpExchange, String> scope;
	private final Duration ttl;
	private final Duration wait;

	private static final int MAX_BODY = 1 << 20; // a larger one gets 413

	/**
	 * The scope is the customer, so that keys of two customers never meet; null if the program has only one. A wait
	 * keeps a connection of the pool.
	 */
	public IdemHttp(DataSource pool, Function<HttpExchange, String> scope, Duration ttl, Duration wait) {
		this.pool = pool;
		this.scope = Objects.requireNonNull(scope, "scope: the customer of a request");
		this.ttl = ttl;
		this.wait = wait;
	}

	/** For handlers that work in the database. */
	public HttpHandler once(Handler handler) {
		return handle((key, request) -> Idem.once(pool, key, tx -> handler.run(tx, request).store()));
	}

	/** For handlers that call the outside world: call does that, record stores what came of it. */
	public <T> HttpHandler leased(Duration lease, Call<T> call, Recorder<T> record) {
		return handle((key, request) -> Idem.leased(pool, key, lease, l -> call.run(l, request),
			(tx, outcome) -> record.run(tx, outcome, request).store()));
	}

	// A structured-field string, or (many clients send that) the bare key.
	private static final Pattern QUOTED = Pattern.compile("\"((?:[ !#-\\[\\]-~]|\\\\[\"\\\\])*)\"");
	private static final Pattern BARE = Pattern.compile("[!#-\\[\\]-~]+");

	/** The key, or null if the header is not valid. A key has 1 to 1024 bytes. */
	static String parseKey(String header) {
		Matcher quoted = QUOTED.matcher(header);
		String key = "";
		if (quoted.matches()) {
			key = quoted.group(1).replaceAll("\\\\(.)", "$1");
		} else if (BARE.matcher(header).matches()) {
			key = header;
		}
		return key.isEmpty() || key.length() > 1024 ? null : key;
	}

	private HttpHandler handle(Run run) {
		return exchange -> {
			try (exchange) {
				answer(exchange, run).send(exchange);
			}
		};
	}

	private Response answer(HttpExchange exchange, Run run) {
		try {
			List<String> header = exchange.getRequestHeaders().get("Idempotency-Key");
			if (header == null || header.size() != 1) {
				return problem(400, "The header Idempotency-Key is missing, or there are several.");
			}
			String key = parseKey(header.get(0));
			if (key == null) {
				return problem(400, "The header Idempotency-Key is not valid: 1 to 1024 visible ASCII characters.");
			}
			byte[] body = exchange.getRequestBody().readNBytes(MAX_BODY + 1);
			if (body.length > MAX_BODY) {
				return problem(413, "The body is too large.");
			}
			// The hash of the body, not the body: any bytes will do, and jsonb does not change them.
			String hash = HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(body));
			String request = Json.write(Map.of("method", exchange.getRequestMethod(),
				"path", exchange.getRequestURI().toString(), "sha256", hash));
			Idem.Answer answer = ask(run, new Idem.Key(key, request, scope.apply(exchange), ttl, wait), new Request(exchange, key, body));
			Response response = Response.load(answer.result());
			return answer.replayed() ? response.header("Idempotent-Replayed", "true") : response;
		} catch (Idem.Busy e) {
			return problem(409, "A request with this key is being processed.").header("Retry-After", "" + e.retryAfter);
		} catch (Idem.Stale e) {
			return problem(409, "Another worker has taken over this request.").header("Retry-After", "1");
		} catch (Idem.Undecided e) {
			return problem(409, "The outcome of this request is unknown: an operator has to decide.");
		} catch (Idem.Mismatch e) {
			return problem(422, "This key was used with another request.");
		} catch (Exception e) {
			System.err.println(e);
			return problem(500, "Internal error. Ask again with the same key.");
		}
	}

	private Idem.Answer ask(Run run, Idem.Key key, Request request) throws Exception {
		try {
			return run.run(key, request);
		} catch (Idem.Busy | Idem.Undecided e) {
			Idem.printHolders(pool, key);
			throw e;
		}
	}

	private static Response problem(int status, String title) {
		return new Response(status, List.of(List.of("Content-Type", "application/problem+json")),
			Json.write(Map.of("title", title, "status", status)));
	}
}
