"""The ticks of schedules, by brute force: what rules T2 and T3 say, without the code of idem.

	ticks.py FROM UNTIL < SCHEDULES

Reads a line for each schedule: name, "cron" or "every", the expression or a number of
seconds, and the time zone, with tabs between them.  Prints the keys of the jobs of all ticks
from FROM to UNTIL, both inclusive.  An interval starts at FROM.
"""

import datetime
import decimal
import sys
import zoneinfo

UTC = datetime.timezone.utc
MINUTE = datetime.timedelta(minutes=1)
DAY = datetime.timedelta(days=1)
SECOND = datetime.timedelta(seconds=1)

NAMES = {name: number for names in (
    zip('jan feb mar apr may jun jul aug sep oct nov dec'.split(), range(1, 13)),
    zip('sun mon tue wed thu fri sat'.split(), range(7))) for name, number in names}
WORDS = {'@yearly': '0 0 1 1 *', '@monthly': '0 0 1 * *', '@weekly': '0 0 * * 0',
         '@daily': '0 0 * * *', '@hourly': '0 * * * *'}
RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def read_value(text):
    return NAMES[text.lower()] if text.isalpha() else int(text)


def read_field(text, first, last):
    values = set()
    for element in text.split(','):
        span, _, step = element.partition('/')
        start, _, end = span.partition('-')
        if span == '*':
            values.update(range(first, last + 1, int(step or 1)))
        else:
            start = read_value(start)
            values.update(range(start, (read_value(end) if end else start) + 1, int(step or 1)))
    return values


class Cron:
    def __init__(self, expression, zone):
        texts = WORDS.get(expression, expression).split()
        self.minutes, self.hours, self.days, self.months, weekdays = (
            read_field(text, *bounds) for text, bounds in zip(texts, RANGES))
        self.weekdays = {weekday % 7 for weekday in weekdays}
        self.either = texts[2][0] != '*' and texts[4][0] != '*'
        self.zone = zoneinfo.ZoneInfo(zone)

    def has_day(self, local):
        if local.month not in self.months:
            return False
        by_day = local.day in self.days
        by_weekday = local.isoweekday() % 7 in self.weekdays
        return by_day or by_weekday if self.either else by_day and by_weekday

    def clock(self, instant):
        """What the clock of the zone shows"""
        return instant.astimezone(self.zone).replace(tzinfo=None)

    def shows(self, local):
        """The instants at which the clock shows this time: none, one or two"""
        instants = {local.replace(tzinfo=self.zone, fold=fold).astimezone(UTC) for fold in (0, 1)}
        return sorted(instant for instant in instants if self.clock(instant) == local)

    def after_gap(self, local):
        """The first instant after a gap that has this time"""
        late, early = (local.replace(tzinfo=self.zone, fold=fold).astimezone(UTC) for fold in (0, 1))
        while late - early > SECOND:
            middle = early + (late - early) // SECOND // 2 * SECOND
            if self.clock(middle) < local:
                early = middle
            else:
                late = middle
        return late

    def by_elapsed_time(self, first, last):
        """T3: all 24 hours: whenever the clock shows the minute"""
        instant = first.replace(second=0, microsecond=0)
        while instant <= last:
            local = self.clock(instant)
            if local.minute in self.minutes and self.has_day(local):
                yield instant
            instant += MINUTE

    def by_clock(self, first, last):
        """T3: other hours: right after a gap, or at the first of two"""
        day = self.clock(first).replace(hour=0, minute=0, second=0, microsecond=0) - DAY
        while day <= self.clock(last):
            if self.has_day(day):
                for hour in self.hours:
                    for minute in self.minutes:
                        local = day.replace(hour=hour, minute=minute)
                        shown = self.shows(local)
                        yield shown[0] if shown else self.after_gap(local)
            day += DAY

    def ticks(self, first, last):
        all_hours = self.hours == set(range(24))
        return self.by_elapsed_time(first, last) if all_hours else self.by_clock(first, last)


def every(seconds, first, last):
    step = datetime.timedelta(microseconds=int(decimal.Decimal(seconds) * 1000000))
    n = 0
    while first + n * step <= last:
        yield first + n * step
        n += 1


def key_of(name, tick):
    fraction = '.%06d' % tick.microsecond if tick.microsecond else ''
    return '%s@%s%sZ' % (name, tick.strftime('%Y-%m-%dT%H:%M:%S'), fraction)


def main():
    first, last = (datetime.datetime.fromisoformat(arg).replace(tzinfo=UTC) for arg in sys.argv[1:3])
    for line in sys.stdin:
        name, kind, text, zone = line.rstrip('\n').split('\t')
        ticks = every(text, first, last) if kind == 'every' else Cron(text, zone).ticks(first, last)
        for tick in sorted({tick for tick in ticks if first <= tick <= last}):
            print(key_of(name, tick))


main()
