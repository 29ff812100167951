import java.math.BigDecimal;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** JSON, because the JDK has none. Use the library that you have instead. */
public final class Json {
	private final String text;
	private int at;

	private Json(String text) { this.text = text; }

	/** Objects become Map, arrays List, numbers Long or BigDecimal. */
	public static Object parse(String text) {
		Json json = new Json(text);
		Object value = json.value();
		if (json.peek() != 0) {
			throw json.bad();
		}
		return value;
	}

	@SuppressWarnings("unchecked")
	public static Map<String, Object> object(String text) { return (Map<String, Object>) parse(text); }

	public static String write(Object value) {
		if (value instanceof Map<?, ?> map) {
			List<String> parts = new ArrayList<>();
			map.forEach((k, v) -> parts.add(quote((String) k) + ":" + write(v)));
			return "{" + String.join(",", parts) + "}";
		}
		if (value instanceof List<?> list) {
			return "[" + String.join(",", list.stream().map(Json::write).toList()) + "]";
		}
		return value instanceof String s ? quote(s) : String.valueOf(value);
	}

	private static String quote(String s) {
		StringBuilder out = new StringBuilder("\"");
		for (char c : s.toCharArray()) {
			if (c == '"' || c == '\\') {
				out.append('\\').append(c);
			} else if (c < ' ') {
				out.append(String.format("\\u%04x", (int) c));
			} else {
				out.append(c);
			}
		}
		return out.append('"').toString();
	}

	private char peek() {
		while (at < text.length() && " \t\r\n".indexOf(text.charAt(at)) >= 0) {
			at++;
		}
		return at < text.length() ? text.charAt(at) : 0;
	}

	private boolean take(char c) {
		boolean there = peek() == c;
		at += there ? 1 : 0;
		return there;
	}

	private void need(char c) {
		if (!take(c)) {
			throw bad();
		}
	}

	private IllegalArgumentException bad() { return new IllegalArgumentException("bad JSON at " + at); }

	private Object value() {
		if (take('{')) {
			Map<String, Object> map = new LinkedHashMap<>();
			while (!take('}')) {
				if (!map.isEmpty()) {
					need(',');
				}
				need('"');
				String name = string();
				need(':');
				map.put(name, value());
			}
			return map;
		}
		if (take('[')) {
			List<Object> list = new ArrayList<>();
			while (!take(']')) {
				if (!list.isEmpty()) {
					need(',');
				}
				list.add(value());
			}
			return list;
		}
		return take('"') ? string() : word();
	}

	private String string() {
		StringBuilder out = new StringBuilder();
		for (; at < text.length(); at++) {
			char c = text.charAt(at);
			if (c == '"') {
				at++;
				return out.toString();
			}
			if (c == '\\') {
				c = text.charAt(++at);
				int escape = "bfnrt".indexOf(c);
				if (c == 'u') {
					c = (char) Integer.parseInt(text.substring(at + 1, at + 5), 16);
					at += 4;
				} else if (escape >= 0) {
					c = "\b\f\n\r\t".charAt(escape);
				}
			}
			out.append(c);
		}
		throw bad();
	}

	private Object word() {
		int start = at;
		while (at < text.length() && (Character.isLetterOrDigit(text.charAt(at)) || "+-.".indexOf(text.charAt(at)) >= 0)) {
			at++;
		}
		String word = text.substring(start, at);
		switch (word) {
			case "null": return null;
			case "true": return true;
			case "false": return false;
			default: return word.matches("-?\\d{1,18}") ? (Object) Long.valueOf(word) : new BigDecimal(word);
		}
	}
}
