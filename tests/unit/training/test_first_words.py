"""What people type first: the grammar's answers are right, and the kept-back questions are kept back."""

import json

from training.storyteller import first_questions
from training.storyteller.grammar import first_words, memory, quick_starts, refusals, small_tasks
from training.storyteller.grammar.dice import Dice

VALUES = {"name": "Ann", "age": 30, "city": "Paris", "job": "baker"}


def exchanges(count=1500):
    return [
        [message.content for message in draw(Dice(f"test/{number}"))]
        for number in range(count)
        for draw in (
            first_words.draw_exchange,
            quick_starts.draw_exchange,
            small_tasks.draw_exchange,
        )
    ]


def test_programs_compile_and_haikus_have_three_lines():
    programs = [*first_words.PROGRAMS.values(), *quick_starts.PROGRAMS.values()]
    for code in [*programs, *small_tasks.SNIPPETS.values()]:
        compile(code, "program", "exec")
    assert {haiku.count("\n") for haiku in first_words.HAIKUS.values()} == {2}


def test_greetings_have_as_many_words_as_asked():
    for answers in first_words.GREETINGS_BY_COUNT.values():
        assert all(len(answer.split()) == count for count, answer in answers.items())


def test_kept_back_questions_are_never_drawn():
    drawn = {asked.lower().rstrip(".?!") for asked, _ in exchanges(6000)}
    questions = [
        *first_questions.KEPT_BACK,
        *first_questions.KEPT_BACK_LATER,
        *first_questions.KEPT_BACK_OF_QUICK_STARTS,
        *first_questions.KEPT_BACK_OF_SMALL_TASKS,
    ]
    kept_back = {question.lower().rstrip(".?!") for question in questions}

    assert len(drawn) > 500
    assert not drawn & kept_back


def test_drawn_answers_hold_what_a_good_answer_must_say():
    judged = [
        (asked, answered)
        for asked, answered in exchanges()
        if asked in first_questions.KNOWN and "haiku" not in asked
    ]

    assert len(judged) > 30
    for asked, answered in judged:
        assert first_questions.holds(answered, first_questions.KNOWN[asked]), asked


def test_terms_that_are_explained_are_not_refused_elsewhere():
    explained = {term.removeprefix("a ").lower() for term in quick_starts.TERMS}
    explained |= {person.lower() for person in small_tasks.PEOPLE}
    refused = [*refusals.SUBJECTS, *refusals.FAMOUS]

    assert not explained & {subject.lower() for subject in refused}


def test_completions_go_on_from_what_they_begin_with():
    for number in range(100):
        text = quick_starts.draw_completion(Dice(f"test/{number}"))
        assert any(
            text == begun + rest and rest.strip()
            for begun, rest in quick_starts.COMPLETIONS.items()
        )


def test_asked_name_was_told_before():
    for number in range(50):
        messages = memory.draw_told_and_asked(Dice(f"test/{number}"))
        told = " ".join(message.content for message in messages if message.role == "user").lower()
        recalled = messages[-1].content.rstrip(".").split()[-1].lower()
        assert recalled in told


def test_values_that_are_told_stand_in_the_json():
    drawn = [first_words._told_person(Dice(f"test/{number}"), VALUES) for number in range(100)]

    for asked, answered in drawn:
        assert all(str(value) in asked for value in json.loads(answered).values())


def test_quoted_words_are_said_again_and_hello_world_is_known_in_capitals():
    drawn = {asked.lower().rstrip("."): answered for asked, answered in exchanges()}

    assert drawn['say "ok"'].lower() == "ok."
    assert any("prints hello, world!" in asked for asked in drawn)
