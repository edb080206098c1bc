"""The texts that an audit asks about when it is given none: prose, questions, lists, code, and texts that repeat
themselves, so that a lookup has something to propose."""

from __future__ import annotations

__all__ = ["PROMPTS"]

PROMPTS = (
    "The old lighthouse keeper opened the door and saw",
    "Write one sentence about a river in winter.",
    "Three reasons to learn how to cook:\n1.",
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "My favourite colours are red, green, red, blue, red, green, red,",
    "Question: What do bees make?\nAnswer:",
    "Once upon a time a fox met a crow, and the fox said to the crow:",
    "The weather tomorrow will be",
    "Name an animal that lives in the sea.",
    "one two three four one two three four one two three",
    "Dear Sir or Madam,\n\nI am writing to you because",
    '{"name": "Ada", "age": 36}\n{"name": "Ben", "age": 41}\n{"name":',
    "A good breakfast has",
    "The train was late again, so we",
    "for i in range(10):\n    print(i)\nfor j in range(20):\n    print(",
    "Translate into French: The cat sleeps on the chair.",
    "I have never been to Iceland, but I",
    "Take the list 4 9 5 7. Reverse the list, then sort from low to high.",
    "Ingredients: flour, sugar, butter, eggs. Method: mix the flour, sugar,",
    "What should I read on a long journey? I would suggest",
    "The committee met on Monday. The committee met on Tuesday. The committee",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n",
    "Tell me something surprising about numbers.",
    "She looked out of the window and thought about",
    "Monday: rain. Tuesday: sun. Wednesday: rain. Thursday:",
    "How do I get better at chess?",
    "The three largest cities in the country are",
    "It was a quiet evening in the village until",
    "Roses are red, violets are blue, sugar is sweet, and",
    "SELECT name, price FROM products WHERE price >",
    "To make tea, first boil the water. Then",
    "Q: 2 + 3 = 5. Q: 4 + 4 = 8. Q: 6 + 1 =",
    "If I could travel anywhere I would go to",
    "The results of the experiment suggest that",
    "Write a short poem about the sea.",
    "# Shopping list\n- apples\n- bread\n-",
    "Why is the sky blue? Explain it to a child.",
    "The captain shouted: all hands on deck! All hands",
    "In the year 2100 people will",
    "Give me a word that rhymes with light.",
)
