--
-- Every SQL object has a comment
--
\a\pset footer off
CREATE VIEW members AS
SELECT classid, objid
  FROM pg_depend
 WHERE refclassid = 'pg_extension'::regclass
   AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem')
   AND deptype = 'e'
   AND (classid <> 'pg_type'::regclass	-- types of tables and array types are members from 17 on
		OR objid IN (SELECT reltype FROM pg_class WHERE relkind = 'c'));

SELECT pg_describe_object(classid, objid, 0) AS without_comment
  FROM members
 WHERE obj_description(objid, (SELECT relname FROM pg_class WHERE oid = classid)) IS NULL;

-- columns of tables, views and types
SELECT a.attrelid::regclass, a.attname AS without_comment
  FROM members JOIN pg_class AS c ON objid = CASE classid WHEN 'pg_class'::regclass THEN c.oid
														  WHEN 'pg_type'::regclass THEN c.reltype END
  JOIN pg_attribute AS a ON a.attrelid = c.oid
 WHERE c.relkind <> 'S'	-- columns of sequences cannot have any
   AND a.attnum > 0 AND NOT a.attisdropped AND col_description(a.attrelid, a.attnum) IS NULL;

-- indexes and constraints of tables
SELECT i.indexrelid::regclass AS without_comment
  FROM members JOIN pg_index AS i ON classid = 'pg_class'::regclass AND i.indrelid = objid
 WHERE obj_description(i.indexrelid, 'pg_class') IS NULL;
SELECT c.conname AS without_comment
  FROM members JOIN pg_constraint AS c ON classid = 'pg_class'::regclass AND c.conrelid = objid
 WHERE c.contype <> 'n' AND obj_description(c.oid, 'pg_constraint') IS NULL;

-- the extension itself, and every setting
SELECT obj_description(oid, 'pg_extension') IS NOT NULL AS commented FROM pg_extension WHERE extname = 'idem';
SELECT name FROM pg_settings WHERE name LIKE 'idem.%' AND short_desc = '';

-- the queries above have seen some members
SELECT count(*) > 10 AS walked FROM members;
DROP VIEW members;
