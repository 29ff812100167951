-- examples/schema.sql: the tables of the example programs, and the role that they connect as
--
-- Run it as a superuser, in an empty database: psql -f examples/schema.sql
CREATE EXTENSION IF NOT EXISTS idem;

CREATE ROLE shop LOGIN;
SELECT pg_catalog.idem_grant('shop', 'app');

CREATE TABLE charges (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    order_id integer NOT NULL,
    cents integer NOT NULL
);
CREATE TABLE orders (id integer PRIMARY KEY, version integer NOT NULL DEFAULT 0);
CREATE TABLE indexed (order_id integer PRIMARY KEY, version integer NOT NULL);
CREATE TABLE sent (recipient text NOT NULL);

-- It stands for a system outside the database: the programs write it over a connection of its own, in autocommit.
CREATE TABLE outside (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, what text NOT NULL);

-- The programs may not read it: for the error 42501 in a handler.
CREATE TABLE forbidden (secret text);

-- Enqueue what should have been indexed and is not. Duplicates are absorbed, so it is safe at any time.
CREATE FUNCTION enqueue_stale_orders() RETURNS bigint LANGUAGE sql AS $$
    SELECT count(*)
      FROM (SELECT coalesce(array_agg(jsonb_build_object('order', o.id)), '{}') AS payloads,
                   coalesce(array_agg('order:' || o.id), '{}') AS keys
              FROM orders AS o LEFT JOIN indexed AS i ON i.order_id = o.id
             WHERE o.version > coalesce(i.version, 0)) AS stale
     CROSS JOIN LATERAL idem_enqueue_many('index', stale.payloads, stale.keys)
$$;

GRANT SELECT, INSERT, UPDATE ON charges, orders, indexed, sent, outside TO shop;
