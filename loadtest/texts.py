"""Texts of our own for prompts: English, Korean, code. Short pieces, shuffled and joined to any length."""

import random

ENGLISH = (
    "A ferry leaves the harbour every hour and carries passengers, bicycles and small trucks to the island.",
    "The first page of the notebook lists the tools that the workshop still has to buy before winter.",
    "When the river is high, the old bridge is closed and everyone walks the long way round the hill.",
    "Measure twice, write the result down, and only then decide whether the number means anything.",
    "She asked what the capital of each country was, and the children answered in three languages.",
    "Bread, butter, two lemons, a bag of rice and, if there is any left, some of the dark honey.",
    "Nobody could say why the clock in the station had stopped at seven minutes past four.",
    "The museum keeps its maps in flat drawers, sorted by century and then by the colour of the ink.",
)
KOREAN = (
    "서울은 대한민국의 수도이며 한강이 도시를 가로질러 흐른다.",
    "오늘은 비가 와서 우리는 도서관에서 하루 종일 책을 읽었다.",
    "배는 매시간 항구를 떠나 섬으로 사람과 짐을 나른다.",
    "할머니께서 끓여 주신 된장찌개는 언제나 맛있었다.",
    "안녕하세요? 처음 뵙겠습니다. 저는 새로 온 학생입니다.",
    "봄이 오면 산과 들에 꽃이 피고 새들이 노래한다.",
)
CODE = (
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
    "for (int i = 0; i < n; ++i) {\n    sum += values[i] * weights[i];\n}\n",
    "SELECT name, COUNT(*) FROM visits WHERE day >= '2024-01-01' GROUP BY name ORDER BY 2 DESC;\n",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.append(item)\n",
    'if [ -f "$path" ]; then\n  echo "found $path"\nelse\n  exit 1\nfi\n',
    "const total = rows.filter(row => row.ok).map(row => row.price).reduce((a, b) => a + b, 0);\n",
)
KINDS = {"english": ENGLISH, "korean": KOREAN, "code": CODE}


def text_of(kind: str, num_pieces: int, seed: int) -> str:
    """`num_pieces` pieces of one kind, in an order of its own for each seed."""
    rng = random.Random(f"{kind} {seed}")
    joiner = "\n" if kind == "code" else " "
    return joiner.join([f"{seed}.", *(rng.choice(KINDS[kind]) for _ in range(num_pieces))])
