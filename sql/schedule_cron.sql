--
-- The ticks of cron expressions, with daylight saving time (T2, T3), and what is no cron
-- expression (T8).
--
-- Each case was reasoned from the rules: the first ticks that are later than "after"; null
-- after the last tick.  The transitions are in the past, where time zones do not change any
-- more, or those of a POSIX specification.
--
\a\pset footer off
SET TimeZone = 'UTC';
SET DateStyle = 'ISO';
SET IntervalStyle = 'postgres';
CALL anew();
CREATE TABLE cases (id int GENERATED ALWAYS AS IDENTITY, cron text, zone text, after timestamptz, ticks timestamptz[], why text);
-- starts_at is inclusive.  The schedule is gone before the background worker can see it.
CREATE FUNCTION first_ticks(cron text, zone text, after timestamptz, n int) RETURNS timestamptz[] LANGUAGE plpgsql AS $$
DECLARE
	ticks timestamptz[];
BEGIN
	FOR i IN 1..n LOOP
		after := idem_schedule('case', 'q', cron, time_zone => zone, starts_at => after + interval '1 us');
		ticks := ticks || after;
	END LOOP;
	PERFORM idem_unschedule('case');
	RETURN ticks;
EXCEPTION
	-- there is no tick any more
	WHEN invalid_parameter_value THEN
		RETURN ticks || NULL::timestamptz;
END
$$;

--
-- Europe/Berlin, 30 March 2025: at 01:00 UTC the clock goes from 02:00 to 03:00
--
INSERT INTO cases (cron, zone, after, ticks, why) VALUES
	('30 2 * * *', 'Europe/Berlin', '2025-03-28 12:00', '{2025-03-29 01:30,2025-03-30 01:00,2025-03-31 00:30}', 'skipped 02:30 runs at 03:00 CEST'),
	('0 2 * * *', 'Europe/Berlin', '2025-03-28 12:00', '{2025-03-29 01:00,2025-03-30 01:00,2025-03-31 00:00}', '02:00 is the first skipped second'),
	('59 1 * * *', 'Europe/Berlin', '2025-03-29 12:00', '{2025-03-30 00:59,2025-03-30 23:59}', 'last minute before the gap: not moved'),
	('0 3 * * *', 'Europe/Berlin', '2025-03-29 12:00', '{2025-03-30 01:00,2025-03-31 01:00}', 'first minute after the gap: regular'),
	('0,30 2 * * *', 'Europe/Berlin', '2025-03-29 12:00', '{2025-03-30 01:00,2025-03-31 00:00,2025-03-31 00:30}', 'two skipped times of a gap are one tick'),
	('30 2,3 * * *', 'Europe/Berlin', '2025-03-29 12:00', '{2025-03-30 01:00,2025-03-30 01:30,2025-03-31 00:30,2025-03-31 01:30}', 'skipped 02:30, then regular 03:30'),
	('0 2,3 * * *', 'Europe/Berlin', '2025-03-29 12:00', '{2025-03-30 01:00,2025-03-31 00:00,2025-03-31 01:00}', 'skipped 02:00 and regular 03:00 are one tick'),
	('*/30 * * * *', 'Europe/Berlin', '2025-03-30 00:15', '{2025-03-30 00:30,2025-03-30 01:00,2025-03-30 01:30,2025-03-30 02:00}', 'all hours: elapsed time, nothing is made up'),
	('0 */2 * * *', 'Europe/Berlin', '2025-03-29 22:30', '{2025-03-29 23:00,2025-03-30 01:00,2025-03-30 02:00,2025-03-30 04:00}', '*/2 has not all hours: skipped 02:00 runs at 03:00, then 04:00'),
	('30 2 * * 0', 'Europe/Berlin', '2025-03-24', '{2025-03-30 01:00,2025-04-06 00:30}', 'the skipped time was on a Sunday'),
	('30 2 * * 1', 'Europe/Berlin', '2025-03-24 12:00', '{2025-03-31 00:30,2025-04-07 00:30}', 'the skipped time was not on a Monday'),
	('30 2 30 3 *', 'Europe/Berlin', '2025-01-01', '{2025-03-30 01:00,2026-03-30 00:30}', 'the date of the skipped time counts'),
	('30 2 * * *', 'Europe/Berlin', '2025-03-30 00:59:59.999999', '{2025-03-30 01:00}', 'a microsecond before'),
	('30 2 * * *', 'Europe/Berlin', '2025-03-30 01:00', '{2025-03-31 00:30}', 'later than "after", not equal'),
	('0 2,3 * * *', 'Europe/Berlin', '2025-03-30 01:00', '{2025-03-31 00:00}', 'the common tick is over'),
	('30 2 * * *', 'Europe/Berlin', '2025-03-30 01:10', '{2025-03-31 00:30}', 'a gap before "after" is over');

--
-- Europe/Berlin, 26 October 2025: at 01:00 UTC the clock goes from 03:00 to 02:00
--
INSERT INTO cases (cron, zone, after, ticks, why) VALUES
	('30 2 * * *', 'Europe/Berlin', '2025-10-25 12:00', '{2025-10-26 00:30,2025-10-27 01:30}', 'the first 02:30 only'),
	('0 2 * * *', 'Europe/Berlin', '2025-10-25 12:00', '{2025-10-26 00:00,2025-10-27 01:00}', 'the second 02:00 is the first instant after the change'),
	('0 3 * * *', 'Europe/Berlin', '2025-10-25 12:00', '{2025-10-26 02:00,2025-10-27 02:00}', '03:00 CEST was never shown'),
	('*/30 1-3 * * *', 'Europe/Berlin', '2025-10-25 22:45', '{2025-10-25 23:00,2025-10-25 23:30,2025-10-26 00:00,2025-10-26 00:30,2025-10-26 02:00,2025-10-26 02:30,2025-10-27 00:00}', 'no tick in the second hour'),
	('30 * * * *', 'Europe/Berlin', '2025-10-25 23:45', '{2025-10-26 00:30,2025-10-26 01:30,2025-10-26 02:30}', 'all hours: both 02:30'),
	('30 0-23 * * *', 'Europe/Berlin', '2025-10-25 23:45', '{2025-10-26 00:30,2025-10-26 01:30,2025-10-26 02:30}', 'all 24 hours, written as a range'),
	('30 0-22 * * *', 'Europe/Berlin', '2025-10-25 23:45', '{2025-10-26 00:30,2025-10-26 02:30}', 'one hour is missing: fixed hours'),
	('0 */2 * * *', 'Europe/Berlin', '2025-10-25 21:30', '{2025-10-25 22:00,2025-10-26 00:00,2025-10-26 03:00}', 'fixed hours'),
	('30 2 * * *', 'Europe/Berlin', '2025-10-26 00:30', '{2025-10-27 01:30}', 'after the first one'),
	('30 2 * * *', 'Europe/Berlin', '2025-10-26 01:10', '{2025-10-27 01:30}', '"after" lies in the second hour'),
	('30 2 26 10 *', 'Europe/Berlin', '2025-10-26 00:45', '{2026-10-26 01:30}', 'not the second one of 2025');

--
-- Other zones.  The rules of POSIX specifications are in the year 2090.
--
INSERT INTO cases (cron, zone, after, ticks, why) VALUES
	('30 2 * * *', 'America/New_York', '2025-03-08 12:00', '{2025-03-09 07:00,2025-03-10 06:30}', 'gap, west of UTC'),
	('30 1 * * *', 'America/New_York', '2025-11-01 12:00', '{2025-11-02 05:30,2025-11-03 06:30}', 'overlap, west of UTC'),
	('15 2 * * *', 'Australia/Lord_Howe', '2025-10-03 20:00', '{2025-10-04 15:30,2025-10-05 15:15}', 'gap of 30 minutes, 02:00 to 02:30, at 10-04 15:30'),
	('15,30 2 * * *', 'Australia/Lord_Howe', '2025-10-03 20:00', '{2025-10-04 15:30,2025-10-05 15:15,2025-10-05 15:30}', 'skipped 02:15 and regular 02:30'),
	('15 * * * *', 'Australia/Lord_Howe', '2025-10-04 14:00', '{2025-10-04 14:45,2025-10-04 16:15,2025-10-04 17:15}', 'the clock never shows 02:15'),
	('45 * * * *', 'Australia/Lord_Howe', '2025-10-04 15:00', '{2025-10-04 15:15,2025-10-04 15:45,2025-10-04 16:45}', '01:45 and 02:45 half an hour apart'),
	('45 1 * * *', 'Australia/Lord_Howe', '2025-04-04 20:00', '{2025-04-05 14:45,2025-04-06 15:15}', 'overlap of 30 minutes, 02:00 to 01:30, at 04-05 15:00'),
	('0 2 * * *', 'Australia/Lord_Howe', '2025-04-04 20:00', '{2025-04-05 15:30,2025-04-06 15:30}', '02:00 is shown once'),
	('45 * * * *', 'Australia/Lord_Howe', '2025-04-05 14:00', '{2025-04-05 14:45,2025-04-05 15:15,2025-04-05 16:15}', 'both 01:45'),
	('30 2 * * *', 'Pacific/Apia', '2011-12-28 20:00', '{2011-12-29 12:30,2011-12-30 10:00,2011-12-30 12:30,2011-12-31 12:30}', '30 December 2011 is skipped as a whole'),
	('0 0 * * *', 'Pacific/Apia', '2011-12-28 20:00', '{2011-12-29 10:00,2011-12-30 10:00,2011-12-31 10:00}', '00:00 of the 30th is skipped, 00:00 of the 31st is regular: one tick'),
	('0 */6 * * *', 'Pacific/Apia', '2011-12-30 03:00', '{2011-12-30 04:00,2011-12-30 10:00,2011-12-30 16:00}', 'four skipped times and a regular one are one tick'),
	('0 12 30 12 *', 'Pacific/Apia', '2011-01-01', '{2011-12-30 10:00,2012-12-29 22:00}', 'its day is skipped'),
	('0 * 30 12 *', 'Pacific/Apia', '2011-12-01', '{2012-12-29 10:00,2012-12-29 11:00}', 'all hours: never shown in 2011'),
	('0 12 * * fri', 'Pacific/Apia', '2011-12-24', '{2011-12-30 10:00,2012-01-05 22:00}', 'the skipped day was a Friday'),
	('0 0 * * *', 'America/Sao_Paulo', '2018-11-03 12:00', '{2018-11-04 03:00,2018-11-05 02:00}', 'midnight is skipped: 00:00 becomes 01:00'),
	('30 0,1 * * *', 'America/Sao_Paulo', '2018-11-03 12:00', '{2018-11-04 03:00,2018-11-04 03:30,2018-11-05 02:30}', 'skipped 00:30, then 01:30'),
	('0 0 4 11 *', 'America/Sao_Paulo', '2018-01-01', '{2018-11-04 03:00,2019-11-04 03:00}', 'a day without midnight'),
	('30 23 * * *', 'America/Sao_Paulo', '2018-02-17 12:00', '{2018-02-18 01:30,2018-02-19 02:30}', '24:00 becomes 23:00 of the day before'),
	('0 0 * * *', 'America/Sao_Paulo', '2018-02-17 12:00', '{2018-02-18 03:00,2018-02-19 03:00}', 'midnight comes once'),
	('*/30 * 17 2 *', 'America/Sao_Paulo', '2018-02-18 00:45', '{2018-02-18 01:00,2018-02-18 01:30,2018-02-18 02:00,2018-02-18 02:30,2019-02-17 03:00}', 'the day has 25 hours'),
	('0 0 * * *', 'Asia/Beirut', '2025-03-29 12:00', '{2025-03-29 22:00,2025-03-30 21:00}', 'midnight is skipped'),
	('@weekly', 'Asia/Beirut', '2025-03-24', '{2025-03-29 22:00,2025-04-05 21:00}', 'midnight of that Sunday is skipped'),
	('0 0 * * *', 'Asia/Beirut', '2025-10-25 12:00', '{2025-10-25 22:00,2025-10-26 22:00}', '24:00 becomes 23:00'),
	('30 23 * * *', 'Asia/Beirut', '2025-10-25 12:00', '{2025-10-25 20:30,2025-10-26 21:30}', 'the first 23:30'),
	('30 1 * * *', 'Europe/Dublin', '2025-03-29 12:00', '{2025-03-30 01:00,2025-03-31 00:30}', 'winter is the daylight saving time here; the clock is what counts'),
	('30 1 * * *', 'Europe/Dublin', '2025-10-25 12:00', '{2025-10-26 00:30,2025-10-27 01:30}', 'the same, overlap'),
	('30 2 * * *', 'Africa/Casablanca', '2024-03-09 12:00', '{2024-03-10 01:30,2024-03-11 02:30}', 'Ramadan begins: 03:00 becomes 02:00'),
	('30 2 * * *', 'Africa/Casablanca', '2024-04-13 12:00', '{2024-04-14 02:00,2024-04-15 01:30}', 'Ramadan ends: 02:00 becomes 03:00'),
	('30 1,2 * * *', 'Antarctica/Troll', '2025-03-29 12:00', '{2025-03-30 01:00,2025-03-30 23:30,2025-03-31 00:30}', 'gap of two hours'),
	('30 1,2 * * *', 'Antarctica/Troll', '2025-10-25 12:00', '{2025-10-25 23:30,2025-10-26 00:30,2025-10-27 01:30}', 'overlap of two hours'),
	('15 2 * * *', 'America/Caracas', '2016-04-30 12:00', '{2016-05-01 06:45,2016-05-02 06:15}', '02:30 becomes 03:00: 02:15 comes before the gap'),
	('45 2 * * *', 'America/Caracas', '2016-04-30 12:00', '{2016-05-01 07:00,2016-05-02 06:45}', '02:45 is skipped'),
	('0 0 * * *', 'Africa/Monrovia', '1972-01-05 12:00', '{1972-01-06 00:44:30,1972-01-07 00:44:30,1972-01-08}', 'offset -0:44:30; at 01-07 00:00:00 the clock goes to 00:44:30'),
	('30 0 * * *', 'Africa/Monrovia', '1972-01-06 12:00', '{1972-01-07 00:44:30,1972-01-08 00:30}', 'skipped; the tick has seconds'),
	('0 0,1 * * *', 'Africa/Monrovia', '1972-01-06 12:00', '{1972-01-07 00:44:30,1972-01-07 01:00,1972-01-08}', ''),
	('*/15 * * * *', 'Africa/Monrovia', '1972-01-07', '{1972-01-07 00:14:30,1972-01-07 00:29:30,1972-01-07 00:45,1972-01-07 01:00}', '00:00 to 00:30 are not shown'),
	('0 9 * * *', 'Asia/Kathmandu', '2025-01-01', '{2025-01-01 03:15,2025-01-02 03:15}', 'no transitions, +05:45'),
	('0 9 * * *', 'UTC', '2025-01-01', '{2025-01-01 09:00,2025-01-02 09:00}', ''),
	('30 2 * * *', 'CET-1CEST,M3.5.0,M10.5.0/3', '2090-03-25 12:00', '{2090-03-26 01:00,2090-03-27 00:30}', 'POSIX, gap'),
	('30 2 * * *', 'CET-1CEST,M3.5.0,M10.5.0/3', '2090-10-28 12:00', '{2090-10-29 00:30,2090-10-30 01:30}', 'POSIX, overlap'),
	('30 * * * *', 'CET-1CEST,M3.5.0,M10.5.0/3', '2090-10-28 23:45', '{2090-10-29 00:30,2090-10-29 01:30,2090-10-29 02:30}', 'POSIX, all hours'),
	('0 12 * * *', 'AAA23BBB-22,M3.2.0,M11.1.0', '2090-03-11 12:00', '{2090-03-12 11:00,2090-03-13 01:00,2090-03-13 14:00}', 'gap of 45 hours: two skipped times, one tick'),
	('0 0 * * *', '<+0517>-5:17', '2090-01-01', '{2090-01-01 18:43,2090-01-02 18:43}', 'POSIX: a fixed offset (one with seconds is refused by the server: pg_tz_acceptable)'),
	('45 1 * * *', 'AAA-1BBB0,J100/2,J100/1:30', '2090-04-09 12:00', '{2090-04-10 00:45,2090-04-11 00:45}', '10 April: 02:00 becomes 01:00 for half an hour, then 01:30 becomes 02:30: 01:45 is neither repeated nor skipped'),
	('15 1,2 * * *', 'AAA-1BBB0,J100/2,J100/1:30', '2090-04-09 12:00', '{2090-04-10 00:15,2090-04-10 01:30,2090-04-11 00:15,2090-04-11 01:15}', 'the same: 01:15 comes twice, 02:15 is skipped'),
	('0 0 * * *', 'UTC+3', '2090-01-01', '{2090-01-01 03:00,2090-01-02 03:00}', 'POSIX: positive is west');

--
-- Calendar, in UTC (T2)
--
INSERT INTO cases (cron, zone, after, ticks, why) VALUES
	('0 0 29 2 *', 'UTC', '2095-01-01', '{2096-02-29,2104-02-29,2108-02-29}', '2100 is no leap year'),
	('0 0 29 2 */7', 'UTC', '2080-03-01', '{2088-02-29,2128-02-29}', '29 February and (*) a Sunday: 40 years'),
	('0 0 */31 1 sun', 'UTC', '2023-01-02', '{2034-01-01,2040-01-01}', '1 January and a Sunday: 11 years'),
	('0 0 31 * *', 'UTC', '2027-01-31', '{2027-03-31,2027-05-31,2027-07-31,2027-08-31,2027-10-31,2027-12-31}', 'month ends'),
	('0 0 30 * *', 'UTC', '2027-01-30', '{2027-03-30,2027-04-30}', ''),
	('59 23 28-31 2 *', 'UTC', '2027-01-01', '{2027-02-28 23:59,2028-02-28 23:59,2028-02-29 23:59,2029-02-28 23:59}', ''),
	('0 0 30 2 *', 'UTC', '2027-01-01', '{NULL}', 'T8'),
	('0 0 31 2,4,6,9,11 *', 'Europe/Berlin', '2027-01-01', '{NULL}', 'T8'),
	('0 0 */31 2-3/5 *', 'UTC', '2027-01-01', '{2027-02-01,2028-02-01}', ''),
	('0 0 31 2 mon', 'UTC', '2027-01-31', '{2027-02-01,2027-02-08,2027-02-15,2027-02-22,2028-02-07}', 'either: Mondays remain'),
	('0 0 1,15 * mon', 'UTC', '2027-03-31', '{2027-04-01,2027-04-05,2027-04-12,2027-04-15,2027-04-19,2027-04-26,2027-05-01}', 'either'),
	('0 0 */2 * mon', 'UTC', '2027-03-31', '{2027-04-05,2027-04-19,2027-05-03,2027-05-17,2027-05-31}', 'the day begins with *: both'),
	('0 0 1,15 * */2', 'UTC', '2027-03-31', '{2027-04-01,2027-04-15,2027-05-01,2027-05-15,2027-06-01,2027-06-15,2027-07-01,2027-07-15}', 'weekdays 0 2 4 6, both: Thu, Thu, Sat, Sat, Tue, Tue, Thu, Thu'),
	('0 0 */31,1-7 * mon', 'UTC', '2027-03-31', '{2027-04-05,2027-05-03,2027-06-07}', 'the first Monday of the month'),
	('0 0 * * 0', 'UTC', '2027-03-31', '{2027-04-04,2027-04-11}', 'Sunday'),
	('0 0 * * 7', 'UTC', '2027-03-31', '{2027-04-04,2027-04-11}', 'Sunday, too'),
	('0 0 * * SUN', 'UTC', '2027-03-31', '{2027-04-04,2027-04-11}', ''),
	('0 0 * * fri-sun', 'UTC', '2027-03-31', '{2027-04-02,2027-04-03,2027-04-04,2027-04-09}', '"sun" ends a range'),
	('0 0 * * 5-7', 'UTC', '2027-03-31', '{2027-04-02,2027-04-03,2027-04-04,2027-04-09}', ''),
	('0 0 * * Mon-Fri', 'UTC', '2027-04-01', '{2027-04-02,2027-04-05}', ''),
	('0 0 1 jan,JUL *', 'UTC', '2027-03-31', '{2027-07-01,2028-01-01}', ''),
	('0 0 1 */5 *', 'UTC', '2027-03-31', '{2027-06-01,2027-11-01,2028-01-01,2028-06-01}', 'months 1, 6, 11'),
	('*/25 0 * * *', 'UTC', '2027-04-01', '{2027-04-01 00:25,2027-04-01 00:50,2027-04-02}', '0, 25, 50: a step begins anew'),
	('*/60 * * * *', 'UTC', '2027-04-01', '{2027-04-01 01:00,2027-04-01 02:00}', 'the largest step'),
	('10-50/20 12-14/2 * * *', 'UTC', '2027-04-01', '{2027-04-01 12:10,2027-04-01 12:30,2027-04-01 12:50,2027-04-01 14:10}', ''),
	('59 23 31 12 *', 'UTC', '2027-12-31 23:58:59.999999', '{2027-12-31 23:59,2028-12-31 23:59}', 'last values of all fields'),
	('* * * * *', 'UTC', '2027-12-31 23:58:30', '{2027-12-31 23:59,2028-01-01,2028-01-01 00:01}', ''),
	('05 09 01 01 *', 'UTC', '2027-04-01', '{2028-01-01 09:05}', 'leading zeros'),
	('@yearly', 'UTC', '2027-03-31 12:00', '{2028-01-01,2029-01-01}', ''),
	('@annually', 'UTC', '2027-03-31 12:00', '{2028-01-01}', ''),
	('@monthly', 'UTC', '2027-03-31 12:00', '{2027-04-01,2027-05-01}', ''),
	('@weekly', 'UTC', '2027-03-31 12:00', '{2027-04-04,2027-04-11}', ''),
	('@daily', 'UTC', '2027-03-31 12:00', '{2027-04-01,2027-04-02}', ''),
	('@Midnight', 'UTC', '2027-03-31 12:00', '{2027-04-01,2027-04-02}', 'any case'),
	('@hourly', 'UTC', '2027-03-31 12:00', '{2027-03-31 13:00,2027-03-31 14:00}', ''),
	('  0 0   1 1 *  ', 'UTC', '2027-03-31', '{2028-01-01}', 'white space (tabs and newlines, too)'),
	('@daily', 'UTC', '294276-12-30', '{294276-12-31,NULL}', 'end of timestamptz'),
	('@yearly', 'America/New_York', '294276-06-01', '{NULL}', ''),
	('0 0 29 2 *', 'UTC', '294276-03-01', '{NULL}', 'the next one would be later than the last timestamp');

-- all of them are later than this
CALL set_clock('1972-01-01');
SELECT id, c.cron, c.zone, c.after, c.ticks AS expected, f.ticks AS found, why
  FROM cases AS c, first_ticks(c.cron, c.zone, c.after, cardinality(c.ticks)) AS f (ticks)
 WHERE f.ticks IS DISTINCT FROM c.ticks
 ORDER BY id;
SELECT count(*), sum(cardinality(ticks)) AS ticks FROM cases;

--
-- The table of a zone whose rules have no end covers 400 years or more.  The server
-- extrapolates from it: noon of one day in each year is at the same UTC time.
--
SELECT cron, zone, count(*), count(DISTINCT extract(year FROM tick)) AS years, array_agg(DISTINCT to_char(tick, 'MM-DD HH24:MI:SS')) AS utc
  FROM (VALUES ('0 12 1 7 *', 'CET-1CEST,M3.5.0,M10.5.0/3'), ('0 12 1 1 *', 'CET-1CEST,M3.5.0,M10.5.0/3'),
			   ('0 12 1 7 *', 'AEST-10AEDT,M10.1.0,M4.1.0/3'), ('0 12 1 1 *', 'AEST-10AEDT,M10.1.0,M4.1.0/3')) AS v (cron, zone),
	   unnest(first_ticks(cron, zone, '2030-01-01', 970)) AS tick
 GROUP BY cron, zone ORDER BY cron, zone;

--
-- T8: what is no cron expression
--
-- values out of range
SELECT idem_schedule('e', 'q', '60 * * * *');
SELECT idem_schedule('e', 'q', '* 24 * * *');
SELECT idem_schedule('e', 'q', '* * 0 * *');
SELECT idem_schedule('e', 'q', '* * 32 * *');
SELECT idem_schedule('e', 'q', '* * * 0 *');
SELECT idem_schedule('e', 'q', '* * * 13 *');
SELECT idem_schedule('e', 'q', '* * * * 8');
SELECT idem_schedule('e', 'q', '1,99999999999999999999 * * * *');
SELECT idem_schedule('e', 'q', '10-60 * * * *');
-- values of another kind
SELECT idem_schedule('e', 'q', 'mon * * * *');
SELECT idem_schedule('e', 'q', '* * jan * *');
SELECT idem_schedule('e', 'q', '* * * mon *');
SELECT idem_schedule('e', 'q', '* * * * jan');
SELECT idem_schedule('e', 'q', '* * * * monday');
SELECT idem_schedule('e', 'q', '-5 * * * *');
SELECT idem_schedule('e', 'q', '5- * * * *');
SELECT idem_schedule('e', 'q', '1-5-7 * * * *');
SELECT idem_schedule('e', 'q', '*-5 * * * *');
SELECT idem_schedule('e', 'q', '*5 * * * *');
SELECT idem_schedule('e', 'q', '5x * * * *');
SELECT idem_schedule('e', 'q', '5.5 * * * *');
SELECT idem_schedule('e', 'q', '* * * * ü');
-- ranges, steps and lists
SELECT idem_schedule('e', 'q', '10-5 * * * *');
SELECT idem_schedule('e', 'q', '* 22-4 * * *');
SELECT idem_schedule('e', 'q', '* * * nov-feb *');
SELECT idem_schedule('e', 'q', '* * * * 5-0');
SELECT idem_schedule('e', 'q', '*/0 * * * *');
SELECT idem_schedule('e', 'q', '*/61 * * * *');
SELECT idem_schedule('e', 'q', '* */25 * * *');
SELECT idem_schedule('e', 'q', '* * */32 * *');
SELECT idem_schedule('e', 'q', '* * * */13 *');
SELECT idem_schedule('e', 'q', '* * * * */8');
SELECT idem_schedule('e', 'q', '*/ * * * *');
SELECT idem_schedule('e', 'q', '*/-5 * * * *');
SELECT idem_schedule('e', 'q', '*/5/2 * * * *');
SELECT idem_schedule('e', 'q', '5/10 * * * *');
SELECT idem_schedule('e', 'q', '* 9/2 * * *');
SELECT idem_schedule('e', 'q', '1,,2 * * * *');
SELECT idem_schedule('e', 'q', ',1 * * * *');
SELECT idem_schedule('e', 'q', '1, * * * *');
-- of other schedulers
SELECT idem_schedule('e', 'q', '* * ? * *');
SELECT idem_schedule('e', 'q', '* * L * *');
SELECT idem_schedule('e', 'q', '* * L-3 * *');
SELECT idem_schedule('e', 'q', '* * 15W * *');
SELECT idem_schedule('e', 'q', '* * * * 5L');
SELECT idem_schedule('e', 'q', '* * * * mon#3');
SELECT idem_schedule('e', 'q', '* * * * 5#3');
SELECT idem_schedule('e', 'q', 'H * * * *');
-- the number of fields, and shorthands
SELECT idem_schedule('e', 'q', '');
SELECT idem_schedule('e', 'q', '   ');
SELECT idem_schedule('e', 'q', '0 0 * *');
SELECT idem_schedule('e', 'q', '0 0 4 * * *');
SELECT idem_schedule('e', 'q', '0 0 1 1 * 2030');
SELECT idem_schedule('e', 'q', 'TZ=Europe/Berlin 0 4 * * *');
SELECT idem_schedule('e', 'q', '@reboot');
SELECT idem_schedule('e', 'q', '@every 5m');
SELECT idem_schedule('e', 'q', '@daily 5');
SELECT idem_schedule('e', 'q', '@dayly');
SELECT idem_schedule('e', 'q', '@');
-- 256 bytes
SELECT idem_schedule('e', 'q', repeat('0,', 123) || '00 * * * *');
-- no day matches
SELECT idem_schedule('e', 'q', '0 0 30 2 *');
SELECT idem_schedule('e', 'q', '0 0 31 2,4,6,9,11 *');
SELECT count(*) FROM idem.schedules;
-- 255 bytes
SELECT idem_schedule('e', 'q', repeat('0,', 123) || '0 * * * *', starts_at => '2090-01-01');

RESET idem.clock_offset;
DROP FUNCTION first_ticks;
DROP TABLE cases;
CALL anew();
