/**
 * What one request wrote, at any moment: its chunks with their times.
 *
 * Thread tags carry the replica's time (`apar.time_ms`), so a browser that reads several chunks at
 * once does not change the times. The browser's clock gives the time of the first chunk only. Chunks
 * without tags have their times of arrival.
 *
 * A chunk's text was generated since the chunk before it, so it appears over that time, for at most
 * `SMOOTH_S`. A view that lags by `SMOOTH_S` therefore grows evenly while chunks arrive. Each thread
 * wrote for as many steps as it has tokens, a new one until the chunk, one that ended from its start.
 */

export const SMOOTH_S = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 0.08;

/** Id of the only thread of a stream without thread tags. */
const ROOT = "root";

export class Answer {
  /** @param {string} title @param {boolean} isOneAtATime whether at most one thread may write */
  constructor(title, isOneAtATime = false) {
    this.title = title;
    this.isOneAtATime = isOneAtATime;
    this.began = performance.now();
    this.chunks = [];
    this.endedAt = null; // seconds, also after a cancellation or an error
    this.finished = false;
    this.error = null;
    this.usage = null;
    this.counts = null; // the `apar` object
    this.tagged = false;
    this.#states = new Map();
    this.#reset();
  }

  get now() {
    return (performance.now() - this.began) / 1000;
  }

  /** The moment to draw while the answer is being written: chunks that arrive late still grow. */
  get drawn() {
    return this.now - SMOOTH_S - this.#lag;
  }

  /** Take a chunk of the stream. */
  add(chunk) {
    const choice = chunk.choices?.[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    const tags = chunk.apar?.updates;
    if (tags) this.tagged = true;
    if (chunk.apar?.decode_steps !== undefined) this.counts = chunk.apar;
    if (chunk.usage) this.usage = chunk.usage;
    let updates = (tags ?? []).filter((update) => update.choice === 0);
    if (!this.tagged && (text || choice?.finish_reason)) {
      updates = [{ id: ROOT, text, tokens: 0, state: choice.finish_reason ? "ended" : "writing" }];
    }
    if (!text && !updates.length) return;
    const at = this.#timeOf(chunk);
    const from = Math.max(this.chunks.at(-1)?.at ?? 0, at - SMOOTH_S);
    this.chunks.push({ from, at, text, updates: this.#timed(updates, from, at) });
  }

  /** Return when a chunk was sent (seconds), never before an earlier chunk. */
  #timeOf(chunk) {
    const last = this.chunks.at(-1)?.at ?? 0;
    if (chunk.apar?.time_ms === undefined) return Math.max(last, this.now);
    const sent = chunk.apar.time_ms / 1000;
    this.#replicaBegan ??= Math.max(0, this.now - sent);
    const at = Math.max(last, this.#replicaBegan + sent);
    this.#lag = Math.max(this.#lag, this.now - at);
    return at;
  }

  /** Return the updates of a chunk with the time in which each thread wrote. */
  #timed(updates, from, at) {
    const tokens = updates.map((update) => update.tokens);
    const steps = this.isOneAtATime ? tokens.reduce((sum, each) => sum + each, 0) : Math.max(...tokens);
    const begins = new Map();
    return updates.map((update) => {
      const before = this.#states.get(update.id);
      const time = ((at - from) * update.tokens) / (steps || 1);
      const isNew = before === undefined || before === "waiting";
      // No thread begins before its parent.
      const begin = isNew ? Math.max(at - time, begins.get(update.parent) ?? from) : from;
      const end = isNew || update.state === "writing" ? at : from + time;
      begins.set(update.id, begin);
      this.#states.set(update.id, update.state);
      return { ...update, from: begin, to: end };
    });
  }

  /** End the answer: complete, or with an error. */
  end(error = null) {
    this.endedAt = Math.max(this.now, this.chunks.at(-1)?.at ?? 0);
    this.finished = error === null;
    this.error = error;
  }

  /** Steps of the engine. The server counts those of threads that all run at once. */
  get steps() {
    if (!this.counts || !this.isOneAtATime) return this.counts?.decode_steps;
    const tokens = this.chunks.flatMap((chunk) => chunk.updates.map((update) => update.tokens));
    return tokens.reduce((sum, each) => sum + each, 0) || this.counts.sequential_steps;
  }

  /** The ordered text as far as it has arrived. */
  get text() {
    return this.chunks.map((chunk) => chunk.text).join("");
  }

  /**
   * Return what had been written at a moment (seconds): the ordered text and the threads.
   *
   * A thread is {id, name, number, position, text, edits, tokens, state, spans, children}; spans are
   * the times in which it wrote or waited. The root comes first. A thread that is `discarded` has no
   * text in the answer.
   */
  at(time) {
    if (this.#index && this.chunks[this.#index - 1].at > time) this.#reset();
    while (this.#index < this.chunks.length && this.chunks[this.#index].at <= time) {
      this.#text += this.chunks[this.#index].text;
      apply(this.#threads, this.chunks[this.#index].updates);
      this.#index += 1;
    }
    const next = this.chunks[this.#index];
    let text = this.#text;
    let threads = this.#threads;
    if (next && time > next.from) {
      text += beginning(next.text, (time - next.from) / (next.at - next.from));
      threads = new Map([...threads].map(([id, thread]) => [id, copied(thread)]));
      apply(threads, next.updates.filter((update) => update.from <= time).map((update) => begun(update, time)));
    }
    const stopped = this.endedAt !== null && time >= this.endedAt;
    return { text, threads: named(threads), time, stopped };
  }

  #replicaBegan = null; // when a replica got the request (seconds)
  #lag = 0; // longest time from sending to arrival, beyond that of the first chunk (seconds)
  #index;
  #text;
  #threads;
  #states; // of the threads when the last chunk arrived

  #reset() {
    this.#index = 0;
    this.#text = "";
    this.#threads = new Map();
  }
}

function copied(thread) {
  return { ...thread, spans: thread.spans.map((span) => ({ ...span })) };
}

function beginning(text, share) {
  const points = Array.from(text);
  return points.slice(0, Math.floor(points.length * share)).join("");
}

/** Return an update as far as it had come at a moment within its time. */
function begun(update, time) {
  if (time >= update.to) return { ...update, edits: null };
  const share = (time - update.from) / (update.to - update.from);
  const text = beginning(update.text, share);
  return { ...update, text, tokens: update.tokens * share, state: "writing", edits: null };
}

function apply(threads, updates) {
  for (const update of updates) {
    const { id, parent = null, position = 0, text, tokens, state, edits, from, to } = update;
    let thread = threads.get(id);
    if (!thread) {
      thread = { id, parent, position, text: "", tokens: 0, state: null, edits: new Map(), spans: [] };
      threads.set(id, thread);
    }
    thread.text += text;
    thread.tokens += tokens;
    for (const edit of edits ?? []) thread.edits.set(edit.paragraph, edit);
    if (state === "ended" && update.finish_reason === "discarded") thread.discarded = true;
    if (state === thread.state) continue;
    const hasWritten = state === "writing" || tokens > 0 || (state === "ended" && !thread.spans.length);
    if (thread.state !== "writing" && hasWritten) extend(thread.spans, "writing", from);
    if (state === "waiting") extend(thread.spans, "waiting", to);
    if (state === "ended") extend(thread.spans, null, to);
    thread.state = state;
  }
}

/** End the last span, and begin another one unless its state is null. */
function extend(spans, state, at) {
  const last = spans.at(-1);
  if (last) last.to = at;
  if (state) spans.push({ state, from: at, to: null });
}

const NUMBERED = new Intl.Collator("en", { numeric: true });

/** Return the threads as a tree: the root, with sorted children. Ids order siblings by number. */
function named(threads) {
  const nodes = new Map([...threads].map(([id, thread]) => [id, { ...thread, children: [] }]));
  let root = null;
  let number = 0;
  for (const node of nodes.values()) {
    const parent = nodes.get(node.parent);
    node.number = number++;
    if (parent && parent !== node) parent.children.push(node);
    else root ??= node;
  }
  const order = [];
  const none = { id: ROOT, number: 0, text: "", tokens: 0, state: "waiting", edits: new Map(), spans: [], children: [] };
  (function visit(node, name) {
    node.name = name;
    order.push(node);
    node.children.sort((a, b) => a.position - b.position || NUMBERED.compare(a.id, b.id));
    node.children.forEach((child, i) => visit(child, name ? `${name}.${i + 1}` : `${i + 1}`));
  })(root ?? none, "");
  return order;
}

/** Return the paragraphs of a thread's text: number i ends where its i-th child was forked. */
function paragraphs(thread) {
  // Positions count code points.
  const points = /[\ud800-\udfff]/.test(thread.text) ? Array.from(thread.text) : thread.text;
  const cuts = thread.children.map((child) => child.position);
  return [...cuts, points.length].map((to, i) => {
    const found = points.slice(i ? cuts[i - 1] : 0, to);
    const text = typeof found === "string" ? found : found.join("");
    const edit = thread.edits.get(i);
    if (!edit) return text;
    const edited = Array.from(text);
    edited.splice(edit.position, edit.length, edit.text);
    return edited.join("");
  });
}

const MARKER = /^\s*(?:\d+[.)]|[-*+•#])/;

/**
 * Divide a thread's text at its forks: prose, and groups of cards that stand side by side.
 *
 * A card is a child behind its lead, the words of the parent that the child continues. A lead that
 * the parent still writes is a card without a child.
 * @returns {({prose: string} | {cards: {lead: string, child: object | null, number: number}[]})[]}
 */
export function layout(thread) {
  const parts = [];
  let group = null;
  const texts = paragraphs(thread);
  const rest = texts.pop();
  thread.children.forEach((child, number) => {
    // Children of one position continue an outline before all of them, not each its own words.
    const neighbours = [thread.children[number - 1], thread.children[number + 1]];
    const isOutlined = neighbours.some((other) => other?.position === child.position);
    const [prose, lead] = isOutlined ? [texts[number], ""] : split(texts[number], group === null);
    if (prose.trim()) parts.push({ prose });
    if (group === null || prose.trim()) parts.push((group = { cards: [] }));
    group.cards.push({ lead, child, number });
  });
  const [prose, lead] = split(rest, group === null);
  const writesLead =
    group !== null &&
    thread.state === "writing" &&
    lead.trim() &&
    !prose.trim() &&
    group.cards[0].lead.trim() &&
    MARKER.test(lead) === MARKER.test(group.cards[0].lead);
  if (writesLead) group.cards.push({ lead, child: null, number: thread.children.length });
  else if (rest.trim() || group === null) parts.push({ prose: rest });
  return parts;
}

/** Split the text before a fork into prose and the lead of the fork's card. */
function split(segment, isFirst) {
  let at = segment.trimEnd().lastIndexOf("\n\n");
  if (at < 0 && isFirst) at = segment.trimEnd().lastIndexOf("\n");
  return at < 0 ? ["", segment] : [segment.slice(0, at), segment.slice(at)];
}
