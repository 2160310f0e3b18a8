"""Notifications to one address: a webhook, an e-mail address, or any service that Apprise knows."""

import shutil
import subprocess
from urllib.parse import unquote, urlsplit

from torchmuster.errors import Impossible
from torchmuster.monitor.alerts.watching import Webhook

_WITHIN_S = 20.0


def open_notifier(address: str) -> Webhook:
    """Return what sends texts to an address, or raise if the address cannot be used here."""
    scheme = urlsplit(address).scheme
    if scheme in ("http", "https"):
        return Webhook(address)
    if scheme == "mailto" and not address.startswith("mailto://"):
        return _Mail(address)
    return _AppriseService(address)


class _Mail(Webhook):
    """Sends e-mail through the ``sendmail`` of this machine."""

    def _check(self) -> None:
        self._program = shutil.which("sendmail", path="/usr/sbin:/usr/lib:/usr/bin")
        if self._program is None:
            raise Impossible(
                "--notify mailto: cannot send e-mail from this machine",
                why="there is no program sendmail",
                fix="use the mail server directly: --notify 'mailtos://USER:PASSWORD@HOST?to=ADDRESS' "
                "(needs pip install 'torchmuster[notify]')",
            )
        self._to = unquote(urlsplit(self.address).path)
        if "@" not in self._to or any(char in self._to for char in "\r\n, "):
            raise Impossible(
                "--notify mailto: needs one address", fix="--notify mailto:ann@example.org"
            )

    def _post(self, text: str) -> str:
        assert self._program is not None
        mail = f"To: {self._to}\nSubject: muster: {text.splitlines()[0][:200]}\n\n{text}\n"
        try:
            subprocess.run(
                [self._program, "-i", "--", self._to],
                input=mail.encode(),
                capture_output=True,
                timeout=_WITHIN_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return f"the e-mail was not sent: sendmail failed ({type(error).__name__})"
        return ""


class _AppriseService(Webhook):
    """Sends through Apprise, an extra."""

    def _check(self) -> None:
        try:
            import apprise
        except ImportError:
            raise Impossible(
                "--notify needs Apprise for this address",
                why="only https://, http:// and mailto:ADDRESS work without it",
                fix="pip install 'torchmuster[notify]'",
            ) from None
        self._service = apprise.Apprise()
        if not self._service.add(self.address):
            raise Impossible(
                "--notify: Apprise does not know this kind of address",
                fix="write it as Apprise's documentation shows for your service",
            )

    def _post(self, text: str) -> str:
        try:
            sent = self._service.notify(title="muster", body=text)
        except Exception as error:  # services raise any type
            return f"the notification was not sent ({type(error).__name__})"
        return (
            ""
            if sent
            else "the notification was not sent: the service refused it or did not answer"
        )
