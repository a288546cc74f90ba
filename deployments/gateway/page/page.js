/** The page's controls: what is asked, with which key, and which moment of the answers is shown. */

import { Answer } from "./answer.js";
import { ApiError, described, listModels, stream } from "./api.js";
import { AnswerView, Timeline, verdict } from "./view.js";

const $ = (id) => document.getElementById(id);
const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };
const LANES = { forked: ["forked"], sequential: ["sequential"], race: ["forked", "sequential"] };
const TITLES = { forked: "Forked", sequential: "Sequential" };

let key = ""; // the API key: in this variable only
let views = [];
let running = null; // AbortController of the current question
let playing = null; // {from, at, speed} of a replay
let frame = 0;
const options = document.querySelector(".options");
const timeline = new Timeline($("chart"), $("table"));

// ---- what is shown -------------------------------------------------------------------------

function say(text) {
  $("status").textContent = text;
}

function showError(text) {
  $("error").hidden = !text;
  $("error").textContent = text;
}

/** End of the time axis (s): of the slowest answer. */
function until() {
  return Math.max(0.1, ...views.map(({ answer }) => answer.endedAt ?? answer.now));
}

function draw(time, moves = false) {
  const drawn = views.map((view) => ({ answer: view.answer, snapshot: view.draw(Math.min(time, view.answer.endedAt ?? time), moves) }));
  timeline.draw(drawn, until());
  return drawn;
}

function tick(now) {
  frame = 0;
  if (playing) {
    const time = Math.min(until(), playing.from + (playing.speed * (now - playing.at)) / 1000);
    $("moment").value = String(Math.round((1000 * time) / until()));
    draw(time, time < until());
    if (time >= until()) pause();
  } else if (views.some(({ answer }) => answer.endedAt === null)) {
    draw(Math.min(...views.map(({ answer }) => answer.drawn)), true);
  } else {
    return;
  }
  schedule();
}

function schedule() {
  frame ||= requestAnimationFrame(tick);
}

function moment() {
  return (Number($("moment").value) / 1000) * until();
}

function pause() {
  playing = null;
  $("play").textContent = "Replay";
}

function play() {
  const from = Number($("moment").value) >= 1000 ? 0 : moment();
  playing = { from, at: performance.now(), speed: Number($("speed").value) };
  $("play").textContent = "Pause";
  schedule();
}

// ---- asking --------------------------------------------------------------------------------

function number(id) {
  return $(id).value === "" ? undefined : Number($(id).value);
}

/** Whether sequential decoding writes the forked answer, one thread after the other. */
function isOneAtATime(lane) {
  return lane === "sequential" && $("sequential").value === "same";
}

function bodyOf(lane, prompt, seed) {
  const chat = $("endpoint").value === "chat";
  const apar = {};
  if (lane === "forked") apar.max_threads = number("max-threads");
  else if (isOneAtATime(lane)) apar.max_threads = 1;
  else apar.enabled = false;
  if ($("tags").value === "threads") apar.stream = "threads";
  return {
    model: $("model").value,
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed,
    stream: true,
    stream_options: { include_usage: true },
    apar,
  };
}

async function run(view, body, signal) {
  const { answer } = view;
  try {
    for await (const chunk of stream(PATHS[$("endpoint").value], body, key, signal)) answer.add(chunk);
    answer.end();
  } catch (error) {
    if (error.name === "AbortError") answer.end("Stopped.");
    else {
      if (!(error instanceof ApiError)) console.error(error);
      answer.end(described(error));
      if (error.status === 401) openKey(true);
    }
  }
}

async function ask(prompt) {
  stop();
  pause();
  showError("");
  const mode = document.querySelector("input[name=mode]:checked").value;
  const controller = (running = new AbortController());
  const lanes = LANES[mode];
  // The threads of two requests with one seed have the same random numbers, so the texts are equal.
  const seed = number("seed") ?? (lanes.length > 1 ? Math.floor(Math.random() * 2 ** 31) : undefined);
  views = lanes.map((lane) => new AnswerView(new Answer(TITLES[lane], isOneAtATime(lane))));
  $("welcome").hidden = true;
  $("answers").hidden = $("timeline").hidden = $("skip").hidden = false;
  $("answers").replaceChildren(...views.map((view) => view.element));
  $("answers").dataset.lanes = String(views.length);
  $("replay").hidden = true;
  $("table").replaceChildren();
  $("send").hidden = true;
  $("stop").hidden = false;
  say("The answer is being written.");
  schedule();
  await Promise.all(views.map((view, i) => run(view, bodyOf(lanes[i], prompt, seed), controller.signal)));
  if (running !== controller) return; // another question has been asked
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  if (document.activeElement === document.body) $("prompt").focus({ preventScroll: true });
  finish();
}

function finish() {
  $("moment").value = "1000";
  timeline.tabulate(draw(until()));
  if (views.length === 2 && views.every(({ answer }) => answer.finished)) {
    const compared = verdict(views[0].answer, views[1].answer);
    if (compared) $("answers").prepend(compared);
  }
  $("replay").hidden = $("timeline").hidden = !views.some(({ answer }) => answer.chunks.length);
  const said = views.map(({ answer }) => {
    if (answer.error) return `${answer.title}: ${answer.error}`;
    const threads = answer.counts?.threads ?? 1;
    const tokens = answer.usage?.completion_tokens;
    return `${answer.title}: complete after ${answer.endedAt.toFixed(1)} s, ${tokens ?? "?"} tokens by ${threads} thread${threads === 1 ? "" : "s"}.`;
  });
  say(said.join(" "));
}

function stop() {
  running?.abort();
}

// ---- models and key ------------------------------------------------------------------------

function openKey(open) {
  $("key-panel").hidden = !open;
  $("key-toggle").setAttribute("aria-expanded", String(open));
  if (open) $("key").focus();
}

async function loadModels() {
  const select = $("model");
  const asked = key;
  try {
    const chosen = select.value;
    const ids = await listModels(asked);
    if (asked !== key) return false; // another key has been entered meanwhile
    select.replaceChildren(...ids.map((id) => new Option(id, id, false, id === chosen)));
    select.disabled = ids.length === 0;
    if (!ids.length) select.replaceChildren(new Option("none for this key"));
    showError("");
    return true;
  } catch (error) {
    if (asked !== key) return false;
    select.disabled = true;
    select.replaceChildren(new Option("–"));
    if (error.status === 401) {
      openKey(true);
      showError(key ? described(error) : "This server asks for an API key.");
    } else showError(`The models cannot be listed. ${described(error)}`);
    return false;
  }
}

$("key-toggle").addEventListener("click", () => openKey($("key-panel").hidden));
$("key-panel").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = $("key").value.trim();
  $("key").value = "";
  if (/[^\x21-\x7e]/.test(given)) {
    showError("An API key has letters, digits and signs of ASCII only, without spaces.");
    return;
  }
  key = given;
  setKeyState();
  if (await loadModels()) {
    openKey(false);
    $("prompt").focus();
  }
});
$("key-forget").addEventListener("click", () => {
  key = "";
  setKeyState();
  loadModels();
});

function setKeyState() {
  $("key-toggle").dataset.set = String(key !== "");
  $("key-toggle").textContent = key ? "API key set" : "API key";
  $("key-forget").hidden = key === "";
}

// ---- controls ------------------------------------------------------------------------------

function grow() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = $("prompt").value.trim();
  if (prompt) ask(prompt);
});
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (options.contains(document.activeElement)) options.querySelector("summary").focus();
  options.open = false;
  stop();
});
document.addEventListener("click", (event) => {
  if (!options.contains(event.target)) options.open = false;
});
// A field that is not shown could not say what is wrong with it.
options.addEventListener("invalid", () => (options.open = true), true);
for (const button of document.querySelectorAll(".examples button")) {
  button.addEventListener("click", () => {
    $("prompt").value = button.textContent;
    grow();
    $("ask").requestSubmit();
  });
}
$("play").addEventListener("click", () => {
  if (!playing) return play();
  pause();
  draw(moment());
});
$("speed").addEventListener("change", () => {
  if (playing) play();
});
$("moment").addEventListener("input", () => {
  pause();
  draw(moment());
});
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = getComputedStyle(root).colorScheme === "dark" || (root.dataset.theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = isDark ? "light" : "dark";
});

/** A link such as #q=...&mode=race fills in the question; nothing is sent before it is asked. */
function readLink() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.has("q")) $("prompt").value = given.get("q");
  const mode = document.querySelector(`input[name=mode][value="${CSS.escape(given.get("mode") ?? "")}"]`);
  if (mode) mode.checked = true;
  grow();
}

readLink();
window.addEventListener("hashchange", readLink);
loadModels();
$("prompt").focus({ preventScroll: true });
