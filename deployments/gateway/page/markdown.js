/**
 * Markdown as DOM nodes, without HTML in between: markdown-it parses, `createElement` builds.
 *
 * HTML in the text stays text, and the page's policy forbids `innerHTML` and its like.
 */

import MarkdownIt from "./markdown-it.esm.min.mjs";

const parser = new MarkdownIt({ html: false });

// Elements by the tokens that open them. The page's own headings are h1 and h2.
const ELEMENTS = {
  paragraph_open: "p", blockquote_open: "blockquote", bullet_list_open: "ul", ordered_list_open: "ol",
  list_item_open: "li", table_open: "table", thead_open: "thead", tbody_open: "tbody", tr_open: "tr",
  th_open: "th", td_open: "td", em_open: "em", strong_open: "strong", s_open: "s", link_open: "a",
  heading_open: { h1: "h3", h2: "h3", h3: "h4", h4: "h5", h5: "h6", h6: "h6" },
}; // prettier-ignore
const BLOCKS = new Set(["P", "UL", "OL", "LI", "BLOCKQUOTE", "H3", "H4", "H5", "H6", "PRE", "CODE", "TABLE", "TBODY", "TR", "TD"]);

function element(tag, text) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  return made;
}

function isWebAddress(address) {
  return /^(https?:\/\/|mailto:)/i.test(address ?? "");
}

function link(address) {
  const made = element("a");
  if (isWebAddress(address)) {
    made.setAttribute("href", address);
    made.setAttribute("target", "_blank");
    made.setAttribute("rel", "noopener noreferrer nofollow");
  }
  return made;
}

function opened(token) {
  if (token.type === "link_open") return link(token.attrGet("href"));
  const known = ELEMENTS[token.type];
  const made = element(typeof known === "string" ? known : (known?.[token.tag] ?? "span"));
  if (token.type === "ordered_list_open" && token.attrGet("start")) made.start = Number(token.attrGet("start"));
  return made;
}

function leaf(token) {
  switch (token.type) {
    case "softbreak":
      return document.createTextNode("\n");
    case "hardbreak":
      return element("br");
    case "hr":
      return element("hr");
    case "code_inline":
      return element("code", token.content);
    case "fence":
    case "code_block": {
      const made = element("pre");
      made.tabIndex = 0; // it may scroll
      made.append(element("code", token.content));
      return made;
    }
    case "image": {
      // Nothing is loaded from elsewhere: an image becomes a link to it.
      const made = link(token.attrGet("src"));
      made.textContent = `Image: ${token.content || token.attrGet("src")}`;
      return made;
    }
    default:
      return document.createTextNode(token.content);
  }
}

function build(tokens, into) {
  const stack = [into];
  for (const token of tokens) {
    if (token.hidden) continue;
    const top = stack.at(-1);
    if (token.type === "inline") build(token.children, top);
    else if (token.nesting === 1) {
      const made = opened(token);
      top.append(made);
      stack.push(made);
    } else if (token.nesting === -1) stack.pop();
    else top.append(leaf(token));
  }
}

/** Return a growing text with the bold type closed that its last paragraph has opened. */
function closed(text) {
  const start = text.lastIndexOf("\n\n") + 1;
  let end = text.length;
  while (end > start && /[\s*]/.test(text[end - 1])) end -= 1;
  const last = text.slice(start, end);
  const isOpen = last.split("**").length % 2 === 0 && !last.includes("`");
  return isOpen ? `${text.slice(0, end)}**` : text;
}

/** An element that shows a growing Markdown text; blocks that have not changed keep their nodes. */
export class Markdown {
  constructor() {
    this.element = element("div");
    this.element.className = "md";
    this.#text = null;
    this.#blocks = [];
    this.#cost = 0;
    this.#drawn = 0;
  }

  #text;
  #blocks; // {source, node} of each top-level block
  #cost; // milliseconds of the last parse
  #drawn;

  /** Show a text. If it grows and more will follow (`moves`), a long one is drawn less often. */
  show(text, grows, moves) {
    const now = performance.now();
    if (grows && moves && now - this.#drawn < 8 * this.#cost) return;
    const shown = grows ? closed(text) : text;
    if (shown === this.#text) return;
    this.#text = shown;
    const lines = shown.split("\n");
    const tokens = parser.parse(shown, {});
    const blocks = [];
    for (let from = 0; from < tokens.length; ) {
      let to = from;
      for (let depth = 0; to < tokens.length; ) {
        depth += tokens[to++].nesting;
        if (depth === 0) break;
      }
      const [first, last] = tokens[from].map ?? [0, 0];
      const source = `${tokens[from].type} ${lines.slice(first, last).join("\n")}`;
      const kept = this.#blocks[blocks.length];
      if (kept?.source === source) blocks.push(kept);
      else {
        const holder = document.createDocumentFragment();
        build(tokens.slice(from, to), holder);
        blocks.push({ source, node: holder.firstChild });
      }
      from = to;
    }
    const kept = new Set(blocks.map((block) => block.node));
    for (const { node } of this.#blocks) if (!kept.has(node)) node.remove();
    blocks.forEach(({ node }, i) => {
      if (this.element.childNodes[i] !== node) this.element.insertBefore(node, this.element.childNodes[i] ?? null);
    });
    this.#blocks = blocks;
    this.#drawn = performance.now();
    this.#cost = this.#drawn - now;
  }

  /** Return the block in which the text ends, for a caret. */
  get end() {
    let found = this.element;
    while (BLOCKS.has(found.lastElementChild?.tagName)) found = found.lastElementChild;
    return found;
  }
}
