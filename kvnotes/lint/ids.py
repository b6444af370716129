"""Identifiers, digests, secrets, temporary paths and addresses.

Owns what looks random, and which names go with values of one request (request, trace, run, job)
rather than of a record (order, product, customer). Digits alone are in `numbers`.
"""

from __future__ import annotations

import re

from kvnotes.lint.context import Context
from kvnotes.lint.findings import Kind
from kvnotes.lint.rules import Rule
from kvnotes.lint.words import word_set

_UUID = re.compile(
    r"(?<![\w-])[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}(?![\w-])"
)
_ULID = re.compile(r"(?<![\w-])[0-7](?=[0-9A-Z]{0,24}[A-Z])[0-9A-HJKMNP-TV-Z]{25}(?![\w-])")
_TRACEPARENT = re.compile(r"(?<![\w-])[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(?![\w-])")
_PREFIXED = re.compile(
    r"(?<![\w/.@#-])(?:req|request|sess|session|run|call|conv|msg|trace|job|task|evt|event|thread"
    r"|chatcmpl|cmpl|resp|toolu|idem|span|tx|txn|batch|upload|inv|exec)[_-](?P<tail>[A-Za-z0-9][A-Za-z0-9_-]{5,79})"
    r"(?![\w/@-])"
)
_JWT = re.compile(
    r"(?<![\w.-])eyJ[A-Za-z0-9_-]{6,2000}\.[A-Za-z0-9_-]{4,4000}\.[A-Za-z0-9_-]{4,1000}(?![\w.-])"
)
_HEX = re.compile(r"(?<![\w@/.#-])(?:(?:sha(?:1|256|384|512)|md5)[:-])?[0-9a-fA-F]{6,128}(?![\w-])")
_OPAQUE = re.compile(
    r"(?<![\w@/.#+%-])(?=[A-Za-z_-]{0,80}\d)[A-Za-z0-9][A-Za-z0-9_%-]{4,126}[A-Za-z0-9]"
    r"(?![\w/@+=%-]|\.\d)"
)
_BASE64 = re.compile(r"(?<![\w+/.-])[A-Za-z0-9][A-Za-z0-9+/_-]{14,4000}={0,2}(?![\w+/=-])")
_UNIX_PATH = re.compile(
    r"(?<![\w/.~-])(?:/private)?/(?:tmp|var/tmp|var/folders|dev/shm)/[^\s\"'`<>|(){},;]{1,240}"
)
_WINDOWS_PATH = re.compile(
    r"(?<!\w)[A-Za-z]:\\(?:[^\s\\\"'<>|]{1,60}\\){1,8}?(?:Temp|tmp)\\[^\s\"'<>|]{1,240}"
)
_HEADER_HEX = re.compile(r"(?<==)[0-9a-f]{4,64}(?![\w.-])")
_HEADER_LINE = re.compile(r"[ \t]{0,8}[xX]-[\w-]{1,40}\s?:")
_COMMIT = re.compile(r"^(?P<value>[0-9a-f]{7,12})(?=\s[A-Z(])", re.MULTILINE)
_FOLDER = re.compile(
    r"/(?:jobs?|sessions?|runs?|threads?|tasks?|conversations?|scratchpads?|sandbox(?:es)?)/"
    r"(?P<value>[A-Za-z0-9][A-Za-z0-9_-]{5,63})(?![\w{-])"
)
_ADDRESS = re.compile(
    r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)"
    r"(?::(?P<port>\d{2,5}))?(?![\w.:]\d|\w|/\d)"
)

_RUNTIME = word_set(
    "request req session sess trace span correlation run job task invocation call conversation "
    "conv thread message msg event nonce instance container pod sandbox idempotency execution "
    "worker batch upload response completion connection stream deployment ulid rid sid chat host "
    "hostname cache prompt traceback error crash lock lease operation query snapshot cursor tx txn "
    "transaction ray"
)
_ID_WORDS = word_set("id key name uid")
_OPEN_IDS = word_set("id uid uuid guid identifier salt nonce ref handle")
_RECORDS = word_set(
    "order product item sku ticket invoice article case parcel flight booking card zip phone isbn "
    "ean iban model tracking policy part serial account device store shop company tenant project "
    "organization org app application tax vat license public vendor merchant seller supplier "
    "course student patient member employee document doc file paper video movie playlist version"
)
_DIGESTS = word_set(
    "checksum hash digest etag sha sha1 sha256 md5 crc crc32 commit build revision rev fingerprint "
    "head signature"
)
_NAMED_OFTEN = frozenset(("commit", "revision", "rev", "head"))
"""Names that documents also use for a fixed one; only a label makes them the current one."""
_THIS = word_set("this current prompt request session build")
_SECRETS = word_set(
    "token bearer secret signature sig cookie csrf authorization apikey jwt password"
)
EPHEMERAL_PORT = 32768
"""Ports from here on are handed out by the system; those below are configured."""
_PEERS = word_set("client peer remote forwarded caller")
_IN_URL = re.compile(r"https?://[^\s?]*/$")
_PEOPLE = word_set("user visitor your guest")
_TRANSITION = re.compile(r"[A-Za-z][0-9]|[0-9][A-Za-z]")
_TMP_NAME = re.compile(r"tmp[._-]?[A-Za-z0-9_]{4,}")
_NUMBERED = re.compile(r"[._-]\d{3,}")
_PLAIN_NAME = re.compile(r"[A-Za-z]+[0-9]{0,4}[A-Za-z]?|[0-9]+[A-Za-z]{0,3}|[0-9]*")


def looks_random(word: str) -> bool:
    """Whether a word reads like a generated one.

    One of its pieces mixes letters and digits more than a name such as `gpt4o` does.
    """
    return any(_is_random(piece) for piece in re.split(r"[_-]", word))


def _is_random(piece: str) -> bool:
    if _PLAIN_NAME.fullmatch(piece):
        return False
    return len(_TRANSITION.findall(piece)) >= 2 or len(piece) >= 8


def _quiet(context: Context) -> bool:
    return context.is_example or context.is_code or _is_pinned(context)


def _is_pinned(context: Context) -> bool:
    """Whether it fixes a version, as in `image@sha256:...`."""
    return bool(re.search(r"@(?:sha(?:1|256|512)[:-])?$", context.before))


def _uuid(match: re.Match[str], context: Context) -> Kind | None:
    if _quiet(context) or context.label.has(_RECORDS) or _IN_URL.search(context.before):
        return None
    return None if match[0].replace("-", "").isdigit() else "uuid"  # a placeholder, or nil


def _id(match: re.Match[str], context: Context) -> Kind | None:
    return None if _quiet(context) or context.label.has(_RECORDS) else "id"


def _prefixed(match: re.Match[str], context: Context) -> Kind | None:
    return _id(match, context) if looks_random(match["tail"]) else None


def _jwt(match: re.Match[str], context: Context) -> Kind | None:
    return None if _quiet(context) else "token"


def _hex(match: re.Match[str], context: Context) -> Kind | None:
    label = context.label
    if _quiet(context) or not label.has(_DIGESTS):
        return None
    near = label.punctuated or not _DIGESTS.isdisjoint(label.words[-3:])
    if not near and not label.has(_THIS):
        return None
    digits = match[0].rpartition(":")[2]
    if digits.isdigit() and len(digits) < 16:
        return None
    of_head = context.after.startswith(" (HEAD") or context.cue() == "live"
    if label.last in _NAMED_OFTEN and not (label.separated or of_head):
        return None
    return "digest" if any(c.isdigit() for c in digits) else None


def _header(match: re.Match[str], context: Context) -> Kind | None:
    """Judge a short hash in a header line, where its name says nothing."""
    if not _HEADER_LINE.match(context.line_head) or _quiet(context):
        return None
    return "digest" if _is_mixed(match[0]) else None


def _commit(match: re.Match[str], context: Context) -> Kind | None:
    return "digest" if _is_mixed(match["value"]) and not context.is_example else None


def _folder(match: re.Match[str], context: Context) -> Kind | None:
    return "id" if looks_random(match["value"]) and not _quiet(context) else None


def _is_mixed(word: str) -> bool:
    return any(c.isdigit() for c in word) and any(c.isalpha() for c in word)


def _opaque(match: re.Match[str], context: Context) -> Kind | None:
    label = context.label
    if label.punctuated and label.last in _DIGESTS and not _quiet(context):
        return "digest" if looks_random(match[0]) else None
    if label.has(_RECORDS) or _quiet(context):
        return None
    if label.last in _OPEN_IDS and len(label.words) > 1:
        return "id" if looks_random(match[0]) else None
    if not label.has(_RUNTIME):
        return None
    near = label.words[-3:] if label.separated else label.words[-2:]
    named = label.separated or label.last in _RUNTIME or label.last in _ID_WORDS
    if not named or _RUNTIME.isdisjoint(near):
        return None
    return "id" if looks_random(match[0]) else None


def _base64(match: re.Match[str], context: Context) -> Kind | None:
    if not context.label.has(_SECRETS) or _quiet(context):
        return None
    return "token" if _is_mixed(match[0]) else None


def _unix_path(match: re.Match[str], context: Context) -> Kind | None:
    if _quiet(context):
        return None
    parts = match[0].rstrip(".:!?").split("/")[2:]
    random = any(
        _TMP_NAME.match(part) or _NUMBERED.search(part) or looks_random(part.split(".")[0])
        for part in parts
    )
    return "path" if random or "/var/folders/" in match[0] else None


def _windows_path(match: re.Match[str], context: Context) -> Kind | None:
    if _quiet(context):
        return None
    parts = re.split(r"\\", match[0])[1:]
    return "path" if any(any(c.isdigit() for c in part) for part in parts[-3:]) else None


def _address(match: re.Match[str], context: Context) -> Kind | None:
    if context.is_example or context.is_call:
        return None
    port = match["port"]
    if port is not None and EPHEMERAL_PORT <= int(port) < 65536:
        return "address"
    label = context.label
    named = label.has(_PEERS) or (label.last == "ip" and label.has(_PEOPLE))
    return "address" if label.separated and named else None


RULES = (
    Rule(_UUID, _uuid),
    Rule(_ULID, _id),
    Rule(_TRACEPARENT, _id),
    Rule(_PREFIXED, _prefixed),
    Rule(_JWT, _jwt),
    Rule(_HEX, _hex),
    Rule(_HEADER_HEX, _header),
    Rule(_COMMIT, _commit),
    Rule(_FOLDER, _folder),
    Rule(_OPAQUE, _opaque),
    Rule(_BASE64, _base64),
    Rule(_UNIX_PATH, _unix_path),
    Rule(_WINDOWS_PATH, _windows_path),
    Rule(_ADDRESS, _address),
)
