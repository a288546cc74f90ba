"""A cluster of hand-made pods, and the actions of its operator and its clients."""

import time
from typing import Any

import httpx
import openai
import yaml

from deployments.config.keys import hash_of
from tests.integration.k8s.pods_by_hand import TOKEN, HandMadePod, HandMadePods

KEY = "apar-alice"
QUESTION: list[Any] = [{"role": "user", "content": "Give me 3 tips for sleeping well."}]
READY_S = 180.0


class Cluster:
    """The running pods and the actions of an operator."""

    def __init__(self, made: HandMadePods, head: HandMadePod, engine: HandMadePod) -> None:
        self.pods = made
        self.head = head
        self.engine = engine
        self.config: dict[str, Any] = {}

    def deploy(self, config: dict[str, Any]) -> None:
        """Send Ray Serve its configuration through the dashboard, as KubeRay does."""
        answer = self._api("PUT", json=config)
        assert answer.is_success, answer.text
        self.config = config

    def replicas(self, deployment: str) -> dict[str, str]:
        """Wait until all replicas of a deployment run; return their ids and their pods."""
        deadline = time.monotonic() + 60
        while True:
            deployments = self._api("GET").json()["applications"]["apar"]["deployments"]
            found = deployments[deployment]["replicas"]
            if found and all(each["state"] == "RUNNING" for each in found):
                return {each["replica_id"]: each["node_ip"] for each in found}
            assert time.monotonic() < deadline, found
            time.sleep(0.5)

    def _api(self, method: str, **arguments: Any) -> httpx.Response:
        url = (
            f"http://{self.head.address}:{self.head.pod.ports['dashboard']}/api/serve/applications/"
        )
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.request(method, url, headers=headers, timeout=30, **arguments)


def client_of(pod: HandMadePod, key: str = KEY) -> openai.OpenAI:
    url = f"http://{pod.address}:{pod.pod.ports['serve']}/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)


def answer_of(pod: HandMadePod, key: str = KEY) -> str:
    chat = client_of(pod, key).chat.completions
    answer = chat.create(model="apar-tiny", messages=QUESTION, temperature=0)
    return answer.choices[0].message.content or ""


def wait_for_answer(pod: HandMadePod, *, refused: bool) -> str:
    """The first answer, or the first refusal of a request, which it takes a moment to get."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            said, is_refusal = answer_of(pod), False
        except openai.BadRequestError as error:
            said, is_refusal = error.message, True
        if is_refusal == refused:
            return said
        time.sleep(1)
    raise AssertionError(said)


def records(*keys: str) -> str:
    return yaml.safe_dump([{"name": f"key-{key}", "hash": hash_of(key)} for key in keys])
