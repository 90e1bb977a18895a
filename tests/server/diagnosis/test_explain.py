"""Every number in an explanation resolves to an evidence row that its sentence cites."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic
import pytest

from server.diagnosis.explain import ExplanationUnavailable, explain, grounded
from server.schemas.checks import Evidence, Finding

ROWS = [
    Evidence(id="step:7", text="step 7: 20% of its trials", values={"share": 0.2}),
    Evidence(id="run", text="3 of 24 trials", values={"failed": 3, "trials": 24}),
]
FINDING = Finding(id="r.x", detector="x", title="Trials fail", detail="3 of 24", fault="infrastructure", evidence=ROWS)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Failures may come from the disk.", True),
        ("Of 24 trials 3 failed [run].", True),
        ("Step 7 lost 20% of its trials [step:7].", True),
        ("Of 24 trials 3 failed, 20% in step 7 [run, step:7].", True),
        ("Of 24 trials 4 failed [run].", False),
        ("Of 24 trials 3 failed.", False),
        ("Of 24 trials 3 failed [step:7].", False),
        ("The loss was 0.2 [step:9].", False),
        ("The share was 0.25 [step:7].", False),
    ],
)
def test_sentences_without_grounded_numbers_are_left_out(text: str, kept: bool) -> None:
    result = grounded(text, ROWS)
    assert (result == text) is kept
    if not kept:
        assert result == "(1 sentence(s) left out: their numbers are not in the evidence they cite.)"


def test_only_the_bad_sentence_goes() -> None:
    assert grounded("Look at the disk. It was 99 % full. Of 24 trials 3 failed [run].", ROWS).startswith(
        "Look at the disk. Of 24 trials 3 failed [run]. (1 sentence"
    )


class Endpoint:
    def __init__(self, status: int, text: str) -> None:
        self.requests: list[dict[str, object]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                body = {
                    "id": "m", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn", "stop_sequence": None,
                    "content": [{"type": "text", "text": text}], "usage": {"input_tokens": 1, "output_tokens": 1},
                }  # fmt: skip
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{self.server.server_address[1]}", api_key="k", max_retries=0)


def test_explain_sends_evidence_and_keeps_grounded_text() -> None:
    endpoint = Endpoint(200, "Of 24 trials 3 failed [run]. Probably 99 more will.")
    text = explain(endpoint.client, "some-model", [FINDING], ["Trials fail: confirmed"])
    assert text.startswith("Of 24 trials 3 failed [run]. (1 sentence")
    prompt = json.dumps(endpoint.requests[0])
    assert "[step:7] step 7: 20% of its trials" in prompt and "Trials fail: confirmed" in prompt


def test_a_model_that_refuses_is_said_in_one_line() -> None:
    with pytest.raises(ExplanationUnavailable, match="some-model did not answer"):
        explain(Endpoint(401, "no").client, "some-model", [FINDING], [])
