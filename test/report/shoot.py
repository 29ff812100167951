#!/usr/bin/env python3
"""Render an HTML file in headless Chromium and look at it.

usage: shoot.py PAGE VIEW=FILE.png...

A view is WIDTHxHEIGHT-SCHEME: 1200x900-light, 390x844-dark; a height of 0 takes the whole
page.  "-" instead of a file takes no picture.  For each view the script prints a line of
what it saw.  It fails if the page logs a message to the console, has a script, requests
anything, or is wider than its view.

It speaks the DevTools protocol over a pipe, and needs nothing but Python and Chromium.
CHROMIUM in the environment names the program.
"""
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FLAGS = [
    '--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
    '--disable-background-networking', '--disable-component-update', '--disable-sync',
    '--disable-extensions', '--disable-dev-shm-usage', '--hide-scrollbars', '--force-color-profile=srgb',
]

FACTS = '''JSON.stringify({
    title: document.title,
    width: document.documentElement.scrollWidth,
    height: document.documentElement.scrollHeight,
    scripts: document.querySelectorAll('script, [onerror], [onclick], [onload]').length,
    sections: [...document.querySelectorAll('section > h2')].map(h => h.textContent),
    background: getComputedStyle(document.body).backgroundColor,
    ran: typeof window.captured,
})'''


class Browser:
    """Chromium with a pipe for commands (its descriptor 3) and one for answers (4)."""

    def __init__(self, profile):
        command_read, self.commands = os.pipe()
        self.answers, answer_write = os.pipe()

        def connect():
            # first out of the way: the pipes may have the numbers 3 and 4 themselves
            read, write = os.dup(command_read), os.dup(answer_write)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [os.environ.get('CHROMIUM', 'chromium'), *FLAGS, '--remote-debugging-pipe',
             f'--user-data-dir={profile}', 'about:blank'],
            preexec_fn=connect, close_fds=False, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(command_read)
        os.close(answer_write)
        self.buffer = b''
        self.number = 0
        self.events = []

    def receive(self):
        while b'\0' not in self.buffer:
            data = os.read(self.answers, 65536)
            if not data:
                raise SystemExit('Chromium has ended.')
            self.buffer += data
        message, self.buffer = self.buffer.split(b'\0', 1)
        return json.loads(message)

    def call(self, method, session=None, **params):
        self.number += 1
        message = {'id': self.number, 'method': method, 'params': params}
        if session is not None:
            message['sessionId'] = session
        os.write(self.commands, json.dumps(message).encode() + b'\0')
        while True:
            answer = self.receive()
            if answer.get('id') == self.number:
                if 'error' in answer:
                    raise SystemExit(f'{method}: {answer["error"]["message"]}')
                return answer['result']
            self.events.append(answer)

    def wait_for(self, method):
        while not any(e.get('method') == method for e in self.events):
            self.events.append(self.receive())

    def close(self):
        os.close(self.commands)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def look(browser, session, page, view):
    size, scheme = view.split('-')
    width, height = (int(n) for n in size.split('x'))
    browser.events.clear()
    browser.call('Emulation.setDeviceMetricsOverride', session, width=width, height=height or 900,
                 deviceScaleFactor=1, mobile=width < 600)
    browser.call('Emulation.setEmulatedMedia', session, media='screen',
                 features=[{'name': 'prefers-color-scheme', 'value': scheme}])
    browser.call('Page.navigate', session, url=page.as_uri())
    browser.wait_for('Page.loadEventFired')
    facts = json.loads(browser.call('Runtime.evaluate', session, expression=FACTS)['result']['value'])
    return width, height or facts['height'], facts


def complaints(browser, page, width, facts):
    for event in browser.events:
        params = event.get('params', {})
        if event.get('method') in ('Runtime.consoleAPICalled', 'Runtime.exceptionThrown', 'Log.entryAdded'):
            yield f'console: {json.dumps(params)[:500]}'
        if event.get('method') == 'Network.requestWillBeSent' and params['request']['url'] != page.as_uri():
            yield f'request: {params["request"]["url"]}'
    if facts['scripts'] or facts['ran'] != 'undefined':
        yield 'there is a script'
    if facts['width'] > width:
        yield f'the page is {facts["width"]} pixels wide'


def main():
    page = Path(sys.argv[1]).resolve()
    profile = tempfile.mkdtemp(prefix='chromium.')
    failed = False
    try:
        browser = Browser(profile)
        target = browser.call('Target.createTarget', url='about:blank')['targetId']
        session = browser.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            browser.call(f'{domain}.enable', session)
        for argument in sys.argv[2:]:
            view, file = argument.split('=', 1)
            width, height, facts = look(browser, session, page, view)
            bad = list(complaints(browser, page, width, facts))
            print(f'{view}: {facts["title"]}: {"; ".join(facts["sections"])}: background {facts["background"]}: '
                  + ('; '.join(bad) or 'ok'))
            failed = failed or bool(bad)
            if file != '-':
                shot = browser.call('Page.captureScreenshot', session, format='png', captureBeyondViewport=True,
                                    clip={'x': 0, 'y': 0, 'width': width, 'height': height, 'scale': 1})
                Path(file).write_bytes(base64.b64decode(shot['data']))
        browser.close()
    finally:
        shutil.rmtree(profile, ignore_errors=True)
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
