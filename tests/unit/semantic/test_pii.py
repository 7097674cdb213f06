import time

import pytest

from dynamo.semantic.classifiers import pii


def types_of(text):
    return [span.type for span in pii.find_spans(text)[0]]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("write to jane.doe+x@mail.example.co.uk please", "EMAIL_ADDRESS"),
        ("card 4111-1111-1111-1111", "CREDIT_CARD"),
        ("card 4111 1111 1111 1111 12/27", "CREDIT_CARD"),
        ("card 4111111111111111 737", "CREDIT_CARD"),
        ("amex 3782 822463 10005 1234", "CREDIT_CARD"),
        ("card 4111.1111.1111.1111.", "CREDIT_CARD"),
        ("amex 378282246310005", "CREDIT_CARD"),
        ("diners 3056 930902 5904", "CREDIT_CARD"),
        ("jcb 3530111333300000 and no more", "CREDIT_CARD"),
        ("visa 4222222222222", "CREDIT_CARD"),
        ("maestro 630495060000000000", "CREDIT_CARD"),
        ("mastercard 2223 0031 2200 3222", "CREDIT_CARD"),
        ("IBAN GB29 NWBK 6016 1331 9268 19", "IBAN_CODE"),
        ("send it to FR7630006000011234567890189", "IBAN_CODE"),
        # of the countries that came to the registry last, with its own examples
        ("BI42 10000 10001 00003320451 81", "IBAN_CODE"),
        ("DJ21 1000 2010 0104 0994 3020 008", "IBAN_CODE"),
        ("FK88 SC12 3456 7890 12", "IBAN_CODE"),
        ("HN88 CABF 0000 0000 0002 5000 5469", "IBAN_CODE"),
        ("MN12 1234 1234 5678 9123", "IBAN_CODE"),
        ("NI45 BAPR 0000 0013 0000 0355 8124", "IBAN_CODE"),
        ("OM81 0180 0000 0129 9123 456", "IBAN_CODE"),
        ("RU03 0445 2522 5408 1781 0538 0913 1041 9", "IBAN_CODE"),
        ("SD21 2901 0501 2340 01", "IBAN_CODE"),
        ("SO21 1000 0010 0100 0100 141", "IBAN_CODE"),
        ("YE15 CBYE 0001 0188 6123 4567 8912 34", "IBAN_CODE"),
        ("pay rahul.k@oksbi by UPI", "EMAIL_ADDRESS"),
        ("SSN 536-90-4399", "US_SSN"),
        ("my social security number is 536904399", "US_SSN"),
        ("from 192.168.10.7", "IP_ADDRESS"),
        ("at 2001:db8::ff00:42:8329", "IP_ADDRESS"),
        ("from fe80::abcd", "IP_ADDRESS"),
        ("call (212) 555-0187", "PHONE_NUMBER"),
        ("call +44 20 7946 0958 now", "PHONE_NUMBER"),
        ("the message on my registered 668 5702", "PHONE_NUMBER"),
        ("my name is Jane Doe", "PERSON"),
        ("I live at 12 Elm Street", "STREET_ADDRESS"),
        ("born on 10/5/1971", "DATE_TIME"),
        ("driver's license number is D1234567", "US_DRIVER_LICENSE"),
        ("driver\u2019s license D1234567", "US_DRIVER_LICENSE"),
        ("my name\u2019s Jane Doe", "PERSON"),
        ("write to info@m\u00fcller.de", "EMAIL_ADDRESS"),
        ("card 4111\u00a01111\u00a01111\u00a01111", "CREDIT_CARD"),
        ("card 4111\u20131111\u20131111\u20131111", "CREDIT_CARD"),
        ("card 4\u200b111 1111 11\u00ad11 1111", "CREDIT_CARD"),
        ("card \uff14\uff11\uff11\uff11 1111 1111 1111", "CREDIT_CARD"),
        ("\u6211\u7684\u5361\u53f7\u662f4111111111111111\u8bf7\u5e2e\u6211", "CREDIT_CARD"),
        ("bob\uff20exam\u200bple.com", "EMAIL_ADDRESS"),
        ("SSN 536\u201190\u20114399", "US_SSN"),
        # as people write them
        ("write to bob [at] example [dot] com", "EMAIL_ADDRESS"),
        ("write to bob(at)example.com", "EMAIL_ADDRESS"),
        (
            "write to \u043f\u0451\u0442\u0440@\u043f\u0440\u0438\u043c\u0435\u0440.\u0440\u0444",
            "EMAIL_ADDRESS",
        ),
        ("write to x@example.xn--p1ai", "EMAIL_ADDRESS"),
        ("card 4111 - 1111 - 1111 - 1111", "CREDIT_CARD"),
        ("card 5555  5555  5555  4444", "CREDIT_CARD"),
        ("card 4111/1111/1111/1111", "CREDIT_CARD"),
        ("phone:415-555-2671", "PHONE_NUMBER"),
        ("phone_number=4155552671", "PHONE_NUMBER"),
        ("07700 900123", "PHONE_NUMBER"),
        ("0171-1234567", "PHONE_NUMBER"),
        ("8 (495) 123-45-67", "PHONE_NUMBER"),
        ("text me on 4155552671", "PHONE_NUMBER"),
        ("born March 12th, 1985", "DATE_TIME"),
        ("D.O.B. 12.03.1985", "DATE_TIME"),
    ],
)
def test_personal_data_is_found(text, kind):
    assert types_of(text) == [kind]


@pytest.mark.parametrize(
    "text",
    [
        "card 4111-1111-1111-1112",
        "IBAN GB29 NWBK 6016 1331 9268 18",
        "000-12-3456 and 666-12-3456",
        "version 1.2.3 of 2024-05-06",
        "the sum of 123456789 and 987654321",
        "999.999.999.999",
        "http://127.0.0.1:8000 and [::1]:8000",
        "how does A::B differ from ::add and Bad::Cafe",
        "4111 1111 1111 1112 12/27",
        # of the length of no such card, with the right sum
        "IMEI 490154203237518",
        "EAN 3045140105505",
        "order 2000000000000006",
        "2019 2020 2021 2022 2023 2024",
        "the ratio is 3:4:5",
        "add 100 200 300 and 400",
        "Dear Sir or Madam",
        "0.123456789012345",
        "Suite 680 36 4022 Oakridge",
        "routing number 124003116",
        "her Aadhar number '98765432100001'",
        "federal tax ID number 98-7654321",
        "ssh admin@server and root@localhost",
        "the IBAN is a number of a bank account",
        # numbers of other things
        "What is the number 123456789 divided by 3?",
        "a text of 1500000 words and message 1700000123",
        "I reach 10000000 steps, and registers hold 10100101",
        "call f(1000000)",
        "2 4 8 16 32 64 128 256 512 1024",
        "(100) 200 300",
        "byte 0012 3456 789a",
        "part number 123-456-7890",
        "1234 5678 9012 3456",
        "upgrade from 2.31.0.4 to 2.31.0.12, version 10.15.7.4",
        "section 1.2.3.4 and netmask 255.255.255.0",
        "git clone git@github.com:org/repo.git",
        "Dear Reader, Dear Colleagues",
    ],
)
def test_harmless_numbers_and_words_pass(text):
    assert types_of(text) == []


def test_span_covers_the_data_alone():
    text = "Ask bob@example.com today"

    (span,) = pii.find_spans(text)[0]

    assert text[span.start : span.end] == "bob@example.com"


def test_span_is_that_of_the_text_with_its_invisible_characters():
    data = "bob@\u200bexample.com"
    text = f"\u8bf7\ufeff\u95ee{data}\u200b\u5417"

    (span,) = pii.find_spans(text)[0]

    assert text[span.start : span.end] == data


def test_hostile_text_is_read_in_linear_time():
    for text in ("a@" * 50_000, "1 " * 100_000, "4111 " * 40_000, ":" * 100_000, "Mr. " * 50_000):
        pii.find_spans(text)


@pytest.mark.parametrize("number", ["1" * 30, "00" + "1" * 30, "1" * 20 + "%"])
def test_digits_that_are_no_number_of_a_telephone_take_no_time(number):
    """A pattern holds up all threads of a process meanwhile."""
    text, began_s = f"{number} " * 4000, time.process_time()

    assert types_of(text) == []
    assert time.process_time() - began_s < 2.0
