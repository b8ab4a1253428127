"""The training log as a small SVG plot."""

from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BELOW = 640, 360, 50, 40


def draw_curve(log: list[dict[str, Any]]) -> str:
    """Training and held-out loss (nats a token) over steps."""
    losses = [value for point in log for value in (point["train"], point["held_out"])]
    low, high, last = min(losses), max(losses), log[-1]["step"]
    span = (high - low) or 1.0

    def at(step: float, loss: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - 20) * step / last
        y = 20 + (_HEIGHT - _BELOW - 20) * (high - loss) / span
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for tick in range(5):
        loss = low + span * tick / 4
        x, y = at(0, loss).split(",")
        parts.append(f'<path d="M{x} {y}H{_WIDTH - 20}" stroke="#ddd"/><text x="8" y="{y}">{loss:.2f}</text>')
        x, _ = at(last * tick / 4, low).split(",")
        parts.append(f'<text x="{x}" y="{_HEIGHT - 20}" text-anchor="middle">{round(last * tick / 4)}</text>')
    for row, (key, name, colour) in enumerate(
        (("train", "training, with dropout", "#1f77b4"), ("held_out", "held-out entries", "#d62728"))
    ):
        points = " ".join(at(point["step"], point[key]) for point in log)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="420" y="{40 + 18 * row}" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 4}" text-anchor="middle">step; loss in nats a token</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
