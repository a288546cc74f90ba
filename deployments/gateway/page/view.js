/** Draws answers: paragraphs in their places, figures, and threads over time. */

import { layout } from "./answer.js";
import { Markdown } from "./markdown.js";

const STATES = { writing: "writing", waiting: "waiting", ended: "done", stopped: "stopped", discarded: "discarded" };
const NUM_HUES = 8;
const isNarrow = matchMedia("(max-width: 42rem)");

export function make(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Name of a thread for its reader. */
export function threadName(thread) {
  return thread.name ? `Thread ${thread.name}` : "Main thread";
}

function stateOf(thread, snapshot) {
  if (thread.discarded) return "discarded";
  return snapshot.stopped && thread.state !== "ended" ? "stopped" : (thread.state ?? "waiting");
}

/** Keep the children of an element in step with a list of keys; absent ones are made. */
class Keyed {
  constructor(parent) {
    this.parent = parent;
    this.items = new Map();
  }

  show(keys, create) {
    const kept = new Set(keys);
    for (const [key, item] of this.items) {
      if (!kept.has(key)) {
        item.element.remove();
        this.items.delete(key);
      }
    }
    return keys.map((key, i) => {
      let item = this.items.get(key);
      if (!item) this.items.set(key, (item = create(key)));
      if (this.parent.children[i] !== item.element) this.parent.insertBefore(item.element, this.parent.children[i] ?? null);
      return item;
    });
  }
}

class Prose {
  constructor() {
    this.markdown = new Markdown();
    this.element = make("div", "prose", this.markdown.element);
    this.caret = make("span", "caret");
  }

  show(text, state, moves) {
    this.markdown.show(text, state === "writing", moves);
    this.element.dataset.state = state;
    if (state !== "writing") this.caret.remove();
    else if (this.markdown.end.lastChild !== this.caret) this.markdown.end.append(this.caret);
  }
}

class Group {
  constructor() {
    this.element = make("div", "cards");
    this.keyed = new Keyed(this.element);
  }

  show(part, thread, snapshot) {
    const cards = this.keyed.show(part.cards.map((card) => card.number), () => new Card());
    cards.forEach((card, i) => card.show(part.cards[i], thread, snapshot));
  }
}

/** A child thread behind the words that it continues. */
class Card {
  constructor() {
    this.name = make("span", "badge-name");
    this.state = make("span", "badge-state");
    this.body = new Parts();
    const badge = make("p", "badge", make("span", "dot"), this.name, this.state);
    this.element = make("article", "card", badge, this.body.element);
  }

  show({ lead, child }, parent, snapshot) {
    const thread = child ?? parent;
    const state = child ? stateOf(child, snapshot) : "lead";
    this.element.dataset.state = state;
    this.element.dataset.hue = child ? String((thread.number - 1) % NUM_HUES) : "main";
    this.element.dataset.thread = child ? child.id : "";
    setText(this.name, threadName(thread));
    setText(this.state, STATES[state] ?? "writing");
    this.element.setAttribute("aria-label", threadName(thread));
    if (child) this.body.show(child, snapshot, lead.trimStart());
    else this.body.showText(lead.trimStart(), "writing", snapshot.moves);
  }
}

/** The text of a thread, with its children in their places. */
class Parts {
  constructor() {
    this.element = make("div", "parts");
    this.keyed = new Keyed(this.element);
  }

  show(thread, snapshot, lead = "") {
    const parts = layout(thread);
    // The lead belongs to the first text; where the child forks at once, it stands before its cards.
    if (lead && parts[0]?.prose === undefined) parts.unshift({ prose: "" });
    const keys = [];
    let number = 0;
    for (const part of parts) keys.push(part.cards ? `cards ${part.cards[0].number}` : `prose ${number++}`);
    const state = stateOf(thread, snapshot);
    const items = this.keyed.show(keys, (key) => (key.startsWith("cards") ? new Group() : new Prose()));
    parts.forEach((part, i) => {
      const isLast = i === parts.length - 1;
      if (part.cards) items[i].show(part, thread, snapshot);
      else items[i].show(i === 0 ? lead + part.prose : part.prose, isLast ? state : "ended", snapshot.moves);
    });
  }

  showText(text, state, moves) {
    const [prose] = this.keyed.show(["prose 0"], () => new Prose());
    prose.show(text, state, moves);
  }
}

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const seconds = (value) => `${value < 10 ? value.toFixed(2) : value.toFixed(1)} s`;

function times(ratio) {
  return `${ratio >= 10 ? ratio.toFixed(0) : ratio.toFixed(1)}×`;
}

/** The figures of an answer: time, tokens per second, steps, KV cache, threads. */
class Figures {
  constructor() {
    this.element = make("dl", "figures");
    this.cells = {};
    for (const [key, label] of [
      ["time", "Time"],
      ["rate", "Tokens/s"],
      ["steps", "Steps"],
      ["cache", "KV cache"],
      ["threads", "Threads"],
    ]) {
      const value = make("span", "value");
      const hint = make("span", "hint");
      this.element.append(make("div", `figure ${key}`, make("dt", "", label), make("dd", "", value, hint)));
      this.cells[key] = { value, hint };
    }
  }

  #set(key, value, hint = "") {
    setText(this.cells[key].value, value);
    setText(this.cells[key].hint, hint);
  }

  show(answer, snapshot) {
    const { usage, counts } = answer;
    const isLive = answer.endedAt === null;
    const atEnd = !isLive && snapshot.time >= answer.endedAt;
    const time = isLive ? answer.now : snapshot.time;
    this.#set("time", seconds(time));
    const written = snapshot.threads.reduce((sum, thread) => sum + thread.tokens, 0);
    const tokens = (atEnd && usage?.completion_tokens) || Math.round(written);
    if (tokens) this.#set("rate", number.format(tokens / time), `${tokens} tokens`);
    else this.#set("rate", "–");
    const writing = snapshot.threads.filter((thread) => thread.state === "writing").length;
    const threads = (atEnd && counts?.threads) || snapshot.threads.length;
    this.#set("threads", String(threads), atEnd ? "" : `${writing} writing`);
    if (!counts || !atEnd) {
      const hint = atEnd ? "" : "at the end";
      this.#set("steps", "–", hint);
      this.#set("cache", "–", hint);
      return;
    }
    const { steps } = answer;
    const fewer = counts.sequential_steps / steps;
    const same = counts.threads > 1 ? `one thread: ${counts.sequential_steps}` : "one thread";
    const against = fewer > 1.005 ? `${times(fewer)} fewer than ${counts.sequential_steps}` : same;
    this.#set("steps", String(steps), answer.isOneAtATime ? "one thread at a time" : against);
    if (answer.isOneAtATime) {
      this.#set("cache", "–");
      return;
    }
    const { max_cached_tokens: slots, sequential_max_cached_tokens: all } = counts;
    const saved = Math.round(100 * (1 - slots / all));
    this.#set("cache", saved > 0 ? `−${saved} %` : saved < 0 ? `+${-saved} %` : "0 %", saved !== 0 ? `${slots} slots, not ${all}` : `${slots} slots`);
  }
}

/** One request's answer with its figures. */
export class AnswerView {
  constructor(answer) {
    this.answer = answer;
    this.figures = new Figures();
    this.parts = new Parts();
    this.whole = new Prose();
    this.whole.element.classList.add("whole");
    this.problem = make("p", "error lane-error");
    this.problem.hidden = true;
    this.shown = "threads";
    this.viewButton = make("button", "quiet small", "Show as one text");
    this.copyButton = make("button", "quiet small", "Copy");
    for (const button of [this.viewButton, this.copyButton]) button.type = "button";
    this.viewButton.addEventListener("click", () => this.#turn());
    this.copyButton.addEventListener("click", () => this.#copy());
    this.title = make("h2", "", answer.title);
    const head = make("div", "lane-head", this.title, make("div", "lane-buttons", this.viewButton, this.copyButton));
    this.body = make("div", "lane-body", this.parts.element, this.whole.element);
    this.element = make("section", "lane panel", head, this.figures.element, this.body, this.problem);
    this.element.setAttribute("aria-label", `${answer.title} answer`);
  }

  #turn() {
    this.shown = this.shown === "threads" ? "text" : "threads";
    setText(this.viewButton, this.shown === "threads" ? "Show as one text" : "Show threads");
    this.draw(this.time);
  }

  async #copy() {
    const copied = navigator.clipboard.writeText(this.answer.text);
    setText(this.copyButton, await copied.then(() => "Copied", () => "Not allowed"));
    setTimeout(() => setText(this.copyButton, "Copy"), 1500);
  }

  /** Draw the answer as it was at a moment (seconds); `moves` if another moment follows at once. */
  draw(time, moves = false) {
    this.time = time;
    const { answer } = this;
    const snapshot = { ...answer.at(time), moves };
    const isTree = answer.tagged && this.shown === "threads";
    const root = snapshot.threads[0];
    const isDone = answer.endedAt !== null && time >= answer.endedAt;
    this.element.setAttribute("aria-busy", String(answer.endedAt === null));
    this.element.dataset.state = answer.endedAt === null ? "running" : answer.finished ? "complete" : "failed";
    this.parts.element.hidden = !isTree;
    this.whole.element.hidden = isTree;
    this.viewButton.hidden = !answer.tagged || answer.counts?.threads === 1;
    this.copyButton.hidden = !navigator.clipboard || !answer.chunks.length;
    if (isTree) this.parts.show(root, snapshot);
    else this.whole.show(snapshot.text, isDone ? "ended" : "writing", moves);
    this.figures.show(answer, snapshot);
    this.problem.hidden = !answer.error;
    if (answer.error) setText(this.problem, answer.error);
    return snapshot;
  }
}

/** Compare a forked answer with a sequential one, both complete; null if a figure is missing. */
export function verdict(forked, sequential) {
  const rate = (answer) => answer.usage?.completion_tokens / answer.endedAt;
  const ratio = rate(forked) / rate(sequential);
  if (!(ratio > 0) || !forked.counts || !sequential.counts) return null;
  const speed = `Forked: ${ratio >= 1 ? times(ratio) : `${ratio.toFixed(2)}×`} the speed`;
  const other = sequential.isOneAtATime ? "the same answer written by one thread at a time" : "decoding without forks";
  const rates = `${number.format(rate(forked))} against ${number.format(rate(sequential))} tokens/s`;
  const text = ` of ${other}: ${rates}, ${forked.steps} against ${sequential.steps} steps. Both ran at the same time.`;
  return make("p", "verdict panel", make("strong", "", speed), text);
}

/** Bars of all threads over time, one row for each; several answers share the axis. */
export class Timeline {
  constructor(chart, table) {
    this.keyed = new Keyed(chart);
    this.chart = chart;
    this.table = table;
  }

  /** @param {{answer: object, snapshot: object}[]} drawn @param {number} until end of the axis (s) */
  draw(drawn, until) {
    const rows = [];
    for (const [lane, { answer, snapshot }] of drawn.entries()) {
      if (drawn.length > 1) rows.push({ key: `title ${lane}`, title: answer.title });
      for (const thread of snapshot.threads) rows.push({ key: `${lane} ${thread.id}`, thread, snapshot });
    }
    rows.push({ key: "axis", until });
    const items = this.keyed.show(rows.map((row) => row.key), (key) => new Row(key));
    items.forEach((item, i) => item.show(rows[i], until));
    const threads = drawn.reduce((sum, { snapshot }) => sum + snapshot.threads.length, 0);
    const label = `Bars of ${threads} threads over ${seconds(until)}. The table below has the same facts.`;
    if (this.chart.getAttribute("aria-label") !== label) this.chart.setAttribute("aria-label", label);
  }

  /** Write the facts of ended answers into the table. */
  tabulate(drawn) {
    const rows = drawn.flatMap(({ answer, snapshot }) =>
      snapshot.threads.map((thread) => {
        const name = drawn.length > 1 ? `${answer.title}: ${threadName(thread)}` : threadName(thread);
        const head = make("th", "", name);
        head.scope = "row";
        const from = thread.spans[0]?.from ?? 0;
        const to = thread.spans.at(-1)?.to ?? snapshot.time;
        const cells = [seconds(from), seconds(to), String(Array.from(thread.text).length), STATES[stateOf(thread, snapshot)]];
        return make("tr", "", head, ...cells.map((cell) => make("td", "", cell)));
      }),
    );
    this.table.replaceChildren(...rows);
  }
}

class Row {
  constructor(key) {
    this.isAxis = key === "axis";
    this.label = make("span", "row-name");
    this.track = make("span", "track");
    this.element = make("div", this.isAxis ? "row axis" : "row", this.label, this.track);
  }

  show({ title, thread, snapshot, until: end }, until) {
    if (title !== undefined) {
      this.element.className = "row row-title";
      setText(this.label, title);
      return;
    }
    if (this.isAxis) {
      this.#ticks(end);
      return;
    }
    setText(this.label, thread.name || "main");
    this.element.dataset.hue = thread.name ? String((thread.number - 1) % NUM_HUES) : "main";
    while (this.track.children.length > thread.spans.length) this.track.lastChild.remove();
    thread.spans.forEach((span, i) => {
      const bar = this.track.children[i] ?? this.track.appendChild(make("span", "bar"));
      const to = span.to ?? snapshot.time;
      bar.dataset.state = span.state;
      bar.style.left = `${(100 * span.from) / until}%`;
      bar.style.width = `${(100 * Math.max(to - span.from, 0.002 * until)) / until}%`;
    });
  }

  #ticks(until) {
    const most = isNarrow.matches ? 4 : 6;
    const step = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300].find((each) => until / each <= most) ?? 600;
    const marks = [];
    for (let at = 0; at <= until * 1.001; at += step) marks.push(at);
    while (this.track.children.length > marks.length) this.track.lastChild.remove();
    marks.forEach((at, i) => {
      const tick = this.track.children[i] ?? this.track.appendChild(make("span", "tick"));
      setText(tick, `${Number(at.toFixed(2))} s`);
      tick.style.left = `${(100 * at) / until}%`;
      tick.classList.toggle("last", at > 0.94 * until); // its label stands before it
    });
  }
}
