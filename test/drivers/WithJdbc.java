// JDBC (pgjdbc): java -cp postgresql.jar WithJdbc.java
import java.net.URI;
import java.sql.Array;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Savepoint;
import java.util.Objects;

public class WithJdbc {
    static boolean failed;

    interface Work { Object run() throws SQLException; }

    static void fact(String text, Object got, Object wanted) {
        boolean equal = Objects.equals(got, wanted);
        failed |= !equal;
        System.out.println((equal ? "ok" : "not ok") + " - jdbc: " + text + (equal ? "" : ": got " + got + ", wanted " + wanted));
    }

    static Object state(Work work) {
        try {
            work.run();
            return "no error";
        } catch (SQLException error) {
            return error.getSQLState();
        }
    }

    static Object ask(Connection conn, String sql, Object... args) throws SQLException {
        try (PreparedStatement s = conn.prepareStatement(sql)) {
            for (int i = 0; i < args.length; i++) s.setObject(i + 1, args[i]);
            try (ResultSet r = s.executeQuery()) {
                return r.next() ? r.getObject(1) : null;
            }
        }
    }

    static Connection open(String more) throws Exception {
        URI url = new URI(System.getenv("POOLED_URL"));
        String[] user = url.getUserInfo().split(":");
        return DriverManager.getConnection("jdbc:postgresql://" + url.getHost() + ":" + url.getPort() + url.getPath() + more, user[0], user[1]);
    }

    // Two connections call their first prepared statement S_1, and pgbouncer lets them share a server connection.
    static Object prepared(String more) throws Exception {
        try (Connection one = open(more); Connection other = open(more)) {
            Object result = "no error";
            for (Connection conn : new Connection[] {one, other}) {
                PreparedStatement s = conn.prepareStatement("SELECT status FROM idem_get(?)");
                s.setString(1, "jd");
                result = state(() -> { for (int n = 0; n < 10; n++) s.executeQuery(); return null; });
            }
            return result;
        }
    }

    // The first cancel may come before the statement.
    static Object cancelled(Connection conn) throws Exception {
        try (PreparedStatement s = conn.prepareStatement("CALL idem_wait('jdnone', '60 s')")) {
            Object[] result = new Object[1];
            Thread wait = new Thread(() -> result[0] = state(() -> s.executeQuery()));
            wait.start();
            for (wait.join(100); wait.isAlive(); wait.join(100)) s.cancel();
            return result[0];
        }
    }

    public static void main(String[] args) throws Exception {
        Connection conn = open("?prepareThreshold=0");
        String claim = "SELECT status FROM idem_claim(?, request => ?::jsonb, wait => ?::interval)";
        fact("without casts: 42883, because a String is sent as varchar", state(() -> ask(conn, "SELECT status FROM idem_claim(?, request => ?)", "jd", "1")), "42883");
        conn.setAutoCommit(false);
        fact("setAutoCommit(false): the first statement begins a transaction", ask(conn, claim, "jd", "{\"a\": 1}", "2 s"), "claimed");
        ask(conn, "SELECT idem_finish(?, ?::jsonb)", "jd", "{\"x\": 1}");
        conn.commit();
        fact("SQLSTATE: getSQLState()", state(() -> ask(conn, claim, "jd", "2", "0")), "ID001");
        fact("commit() of a failed transaction raises no error", state(() -> { conn.commit(); return null; }), "no error");
        state(() -> ask(conn, "SELECT 1 / 0"));
        fact("… but idem_finish as the last statement does", state(() -> ask(conn, "SELECT idem_finish('jd')")), "25P02");
        conn.rollback();
        Savepoint savepoint = null;
        ask(conn, claim, "jd2", "1", "0");
        savepoint = conn.setSavepoint();
        state(() -> ask(conn, "SELECT 1 / 0"));
        conn.rollback(savepoint);
        ask(conn, "SELECT idem_finish('jd2', '402')");
        conn.commit();
        fact("setSavepoint() and rollback(savepoint): the claim stays", ask(conn, "SELECT result::text FROM idem_get('jd2')"), "402");
        conn.rollback();
        conn.setAutoCommit(true);
        Object token = ask(conn, "SELECT token FROM idem_lease(?, ?::interval)", "jdl", "30 s");
        fact("autocommit for a lease; a token is a Long", token.getClass(), Long.class);
        fact("a token as parameter (setLong) needs no cast", ask(conn, "SELECT idem_finish('jdl', '1', ?)", token), true);
        fact("jsonb is a PGobject: getString() or ::text", ask(conn, "SELECT result FROM idem_get('jd')").getClass().getSimpleName(), "PGobject");
        Array ids = conn.createArrayOf("bigint", new Long[] {1L});
        fact("createArrayOf(\"bigint\", …) for heartbeat", ask(conn, "SELECT count(*) FROM idem_heartbeat(?, ?, '5 s')", ids, ids), 1L);
        fact("SELECT f() gives a PGobject", ask(conn, "SELECT idem_claim('jd')").getClass().getSimpleName(), "PGobject");
        fact("a NULL: setObject(n, null) with a cast", ask(conn, claim, "jd", null, "0"), "finished");
        ask(conn, "SELECT job_id FROM idem_enqueue('jdw')");
        fact("CALL idem_wait in autocommit returns a row", ask(conn, "CALL idem_wait(?, ?::interval)", "jdw", "30 s"), true);
        fact("createArrayOf(\"text\", …) for idem_wait_any", ask(conn, "CALL idem_wait_any(?)", conn.createArrayOf("text", new String[] {"jdw"})), true);
        conn.setAutoCommit(false);
        fact("CALL idem_wait without autocommit: 25001", state(() -> ask(conn, "CALL idem_wait('jdw')")), "25001");
        conn.rollback();
        conn.setAutoCommit(true);
        fact("statement.cancel() ends a wait", cancelled(conn), "57014");
        fact("default prepareThreshold (5) behind pgbouncer: 42P05", prepared(""), "42P05");
        fact("prepareThreshold=0 works behind pgbouncer", prepared("?prepareThreshold=0"), "no error");
        System.exit(failed ? 1 : 0);
    }
}
