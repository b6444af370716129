"""Words of several languages: those that make a value the reader's own, and names of days.

Owns the words only, as alternatives of verbose regular expressions. Languages: English, German,
French, Spanish, Italian, Portuguese, Dutch, Polish, Russian, Chinese, Japanese, Korean, and a few
words of Swedish and Turkish.
"""

# ruff: noqa: RUF001 (letters of other scripts look like Latin ones)

from __future__ import annotations

LIVE = r"""
    now | today(?:['’]?s)? | tonight | reference\ date | current(?:ly)? | presently
    | at\ (?:present|the\ moment)
    | (?:local|server|system|wall)\ time | (?:date|time)\ is | (?:date|time)\ of\ (?:the\ )?request
    | clock | heute | heutig\w* | aktuell\w* | jetzt | derzeit\w* | uhrzeit
    | aujourd['’]hui | nous\ sommes | du\ jour | actuel(?:le)?(?:ment)? | maintenant
    | hoy | actual(?:es|mente)? | ahora | oggi | odiern\w* | attual[ei]\w* | adesso
    | nu | hoje | atual(?:mente)? | agora | vandaag | huidige | momenteel | dzisiaj | dziś
    | dzisiejsz\w*
    | obecn\w* | teraz | idag | i\ dag | bugün | şu\ an\w* | сегодня\w* | сейчас | текущ\w*
"""
LIVE_CJK = r"今天|今日|本日|当前|當前|现在|現在|目前|오늘|현재|지금"
STAMP = r"""
    timestamp | date\ ?time | date\ and\ time
    | last\ (?:seen|log\ ?in|active|sync\w*|check\w*|run|used|modified|access\w*|visit\w*)
    | (?:request|query|session|generation|build|boot)\ (?:date|time)
    | (?:session|sandbox|run|job|task|conversation|chat|process|server|link|url|token)
      \ (?:start(?:s|ed)?|began|begins?|opened|created|expires?|expiry)
    | time\ (?:in|at)\ \w+(?:\ \w+)?\ is
    | user\ (?:opened|logged\ in|signed\ in|connected|asked|wrote|sent|joined|entered|called)
    | launched | generated | rendered | fetched | retrieved | refreshed | updated | synced | logged
    | session | request(?:ed)? | booted | stand
"""
STABLE = r"""
    before | after | since | until | till | between | through | prior | (?:later|earlier)\ than
    | (?:older|newer|more|less)\ than | at\ least | from | by | valid | effective | expir\w*
    | deadline | due | cut\ ?off | knowledge | born | birth\w* | founded | signed | released?
    | published | version | revised | approved | schedul\w* | meeting | appointment | event
    | landed | placed | ordered | orders? | created | delivered | shipped | purchas\w* | bought
    | joined | copyright | holiday | depart\w* | arriv\w* | leaves | open(?:s|ed|ing)?
    | clos(?:e|es|ed|ing) | starts? | ends? | begins? | took\ place | held | died | won
    | introduced | anniversary | edition | offer\w* | vor | nach | bis | seit | ab | gilt | gültig
    | öffnungszeiten | avant | après | jusqu\w* | depuis | ouvert\w* | antes | después | hasta
    | desde | termina | prima | fino | até | tot | vanaf | przed | od | до | после | от | если
"""
STABLE_CJK = r"之前|之后|之後|以前|以后|以後|以降|まで|から|截止|营业|營業|까지|부터|이전|이후"
EXAMPLE = r"""
    e\.\ ?g\b | (?<![.@/])\bexamples?\b(?!\.\w) | \bfor\ instance\b | \bsuch\ as\b
    | \blooks?\ like\b | \bsomething\ like\b | \bof\ the\ form\b | \bformat(?:s|ted)?\b
    | (?:->|\u2192|=>)\s*(?:output|result)\b | ^\W*input\b | \bpattern\b | \bsamples?\b
    | \bplaceholder\b | \bfixture\b | \bdummy\b | \bexpected\b | \bexpects?\b | \bmeans\b
    | \bdocumentation\b | \bz\.\ ?b\. | \bbeispiel\w*\b | \bpar\ exemple\b | \bpor\ ejemplo\b
    | \bper\ esempio\b | \bpor\ exemplo\b | \bnp\. | \bнапример\b | 例如 | 例えば | 예를\ 들어
"""
EXAMPLE_BEHIND = (
    r"\bis (?:an? )?(?:valid|example|invalid)\b|(?<![.@/])\bexample\b(?!\.\w)|\bfixture\b|\bmeans\b"
)

MONTHS = """
    january|february|march|april|may|june|july|august|september|october|november|december
    |jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec
    |januar|februar|märz|mai|juni|juli|oktober|dezember|mrz|okt|dez
    |janvier|février|mars|avril|juin|juillet|août|septembre|octobre|novembre|décembre
    |enero|febrero|marzo|abril|mayo|junio|julio|agosto|septiembre|octubre|noviembre|diciembre
    |gennaio|febbraio|aprile|maggio|giugno|luglio|settembre|ottobre|dicembre
    |janeiro|fevereiro|março|maio|junho|julho|setembro|outubro|novembro|dezembro
    |januari|februari|maart|mei|augustus
    |stycznia|lutego|marca|kwietnia|maja|czerwca|lipca|sierpnia|września|października|listopada
    |grudnia|января|февраля|марта|апреля|мая|июня|июля|августа|сентября|октября|ноября|декабря
"""
WEEKDAYS = """
    monday|tuesday|wednesday|thursday|friday|saturday|sunday
    |mon|tues?|wed|thu(?:rs?)?|fri|sat|sun
    |montag|dienstag|mittwoch|donnerstag|freitag|samstag|sonntag
    |lundi|mardi|mercredi|jeudi|vendredi|samedi|dimanche
    |lunes|martes|miércoles|jueves|viernes|sábado|domingo
    |lunedì|martedì|mercoledì|giovedì|venerdì|sabato|domenica
    |segunda(?:-feira)?|terça(?:-feira)?|quarta(?:-feira)?|quinta(?:-feira)?|sexta(?:-feira)?
    |maandag|dinsdag|woensdag|donderdag|vrijdag|zaterdag|zondag
    |poniedziałek|wtorek|środa|czwartek|piątek|sobota|niedziela
    |понедельник|вторник|среда|четверг|пятница|суббота|воскресенье
"""


def word_set(words: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(words.split())


LIMITS = word_set(
    "max maximum limit up most least min minimum allowed default per every each within size"
)
"""Words that make a number a rule's own."""
