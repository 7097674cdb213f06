"""The grammar of the training text: seeded, consistent within a story, and without the held-out samples."""

import json
import re

import pytest
from training.storyteller import far_questions
from training.storyteller.grammar import (
    facts,
    refusals,
    stories,
    story_talk,
    structured,
    sums,
    text,
    tools,
    words,
)
from training.storyteller.grammar.conversation import draw_conversation
from training.storyteller.grammar.dice import Dice, is_held_out
from training.storyteller.grammar.messages import Conversation, Message, exchange
from training.storyteller.render import render

UNFILLED = re.compile(r"\{[A-Za-z_]+\}")


def draw_texts(count: int) -> list[str]:
    return [render(draw_conversation(Dice(f"test/{number}"))) for number in range(count)]


def story_of(trait: str, seed: int = 0) -> stories.Story:
    dice = Dice(f"{trait}/{seed}")
    while (story := stories.draw_story(dice)).slots["trait"] != trait:
        pass
    return story


def test_equal_seeds_give_equal_text():
    assert draw_texts(20) == draw_texts(20)


def test_different_seeds_give_different_text():
    assert len(set(draw_texts(100))) > 95


def test_every_slot_is_filled():
    assert [found for each in draw_texts(300) for found in UNFILLED.findall(each)] == []


def test_vocabulary_still_grows_after_many_samples():
    found = {word for each in draw_texts(700) for word in re.findall(r"[A-Za-z']+", each)}

    assert len(found) > 2500


@pytest.mark.parametrize("trait", stories.TRAITS)
def test_story_repeats_its_item_and_names_no_other(trait):
    story = story_of(trait)
    told = story.tell()

    assert told.count(story.slots["item"]) >= 2
    assert [item for item in words.ITEMS if re.search(rf"\b{item}\b", told)] == [
        story.slots["item"]
    ]


@pytest.mark.parametrize("trait", ["brave", "cowardly", "proud", "tiny"])
def test_pronoun_agrees_with_the_name(trait):
    story = story_of(trait)
    girl, boy = story.changed(name="Anna").tell(), story.changed(name="Tom").tell()

    assert not re.search(r"\b(he|him|his)\b", girl, re.IGNORECASE)
    assert not re.search(r"\b(she|her)\b", boy, re.IGNORECASE)


def test_correction_changes_only_the_kind():
    story = story_of("brave")
    old, new = f"brave {story.slots['kind']}", "brave walrus"

    assert new in story.changed(kind="walrus").tell()
    assert old not in story.changed(kind="walrus").tell()
    assert story.changed(kind="walrus").changed(kind=story.slots["kind"]) == story


@pytest.mark.parametrize("kind", story_talk.QUESTIONS)
def test_answer_about_a_story_agrees_with_the_story(kind):
    dice = Dice(kind)
    while kind not in story_talk.question_kinds(story := stories.draw_story(dice)):
        pass
    _, answer = story_talk.question(dice, story, kind)

    assert story.slots[story_talk.QUESTIONS[kind][0]] in answer


def test_training_text_excludes_held_out_samples():
    dice = Dice(1)

    assert not any(sums.draw_sum(dice).is_held_out for _ in range(300))
    assert not any(facts.draw_fact(dice).is_held_out for _ in range(300))
    heroes = {stories.draw_hero(dice) for _ in range(300)} - set(stories.ALWAYS_SEEN)
    assert not any(is_held_out("hero", *hero) for hero in heroes)


def test_evaluation_uses_held_out_samples_only():
    dice = Dice(1)

    assert all(sums.draw_sum(dice, held_out=True).is_held_out for _ in range(50))
    assert all(facts.draw_fact(dice, held_out=True).is_held_out for _ in range(50))
    assert all(is_held_out("hero", *stories.draw_hero(dice, held_out=True)) for _ in range(50))


def test_questions_to_refuse_are_disjoint_between_training_and_evaluation():
    def ask(held_out: bool) -> set[str]:
        dice = Dice(2)
        drawn = (refusals.draw_exchange(dice, held_out=held_out) for _ in range(300))
        return {question.content.lower() for question, _ in drawn}

    # Greetings and the like belong to both.
    assert len({each for each in ask(True) & ask(False) if len(each) > 12}) <= 1


@pytest.mark.parametrize("seed", range(10))
def test_sums_are_correct(seed):
    drawn = sums.draw_sum(Dice(seed))

    assert eval(str(drawn).replace("x", "*")) == drawn.result
    assert sums.steps(drawn).endswith(f"= {drawn.result}.")


def test_json_answers_parse():
    for seed in range(100):
        _, answer = structured.draw_exchange(Dice(seed))
        json.loads(answer.content)


def test_tool_call_has_the_name_and_required_arguments():
    for seed in range(100):
        dice = Dice(seed)
        use = tools.draw_use(dice)
        function = use.spec["function"]

        assert set(function["parameters"]["required"]) <= set(use.arguments)
        assert use.name in [spec["function"]["name"] for spec in tools.draw_specs(dice, use)]


@pytest.mark.parametrize(
    ("noun", "expected"),
    [
        ("owl", "an owl"),
        ("cat", "a cat"),
        ("unicorn", "a unicorn"),
        ("honest fox", "an honest fox"),
    ],
)
def test_article_fits_the_noun(noun, expected):
    assert text.article(noun) == expected


def test_sentence_of_a_tool_is_said_again():
    dice = Dice("words")
    drawn = [tools.use_messages(dice, tools.draw_use(dice)) for _ in range(200)]
    answered = [messages for messages in drawn if len(messages) == 4]
    in_words = [messages for messages in answered if not messages[2].content.startswith("{")]

    assert len(in_words) > 20
    assert all(messages[3].content == messages[2].content for messages in in_words)


def test_far_questions_are_refused_and_leave_the_conversations_whole():
    said = (Message("system", "Be kind."), *exchange("Say hi", "Hi!"))
    calling = Conversation(said, tools=({"name": "look"},))
    drawn = [Conversation(said), calling] * 50

    made = list(far_questions.add_far_questions(drawn, ["Where is my card?"], "test"))
    texts = [tuple(message.content for message in each.messages) for each in made]
    asked = [each for each in made if any(m.content == "Where is my card?" for m in each.messages)]

    assert len(asked) > 20
    assert all(refusals.is_refusal(_answer_to("Where is my card?", each)) for each in asked)
    assert [each for each in made if each.tools] == [calling] * 50
    assert all(each[0] == "Be kind." for each in texts if "Be kind." in each)


def _answer_to(question, conversation):
    contents = [message.content for message in conversation.messages]
    return contents[contents.index(question) + 1]
