// What the snapshot kept: the text shaded token by token, and entries and bytes per layer and head.

import { call } from "./api.js";
import { count, h, megabytes } from "./dom.js";

const LEVELS = 16; // neighbours of one shade become one element
const WORDS = {
  kept: ["The brighter a word, the more attention heads kept it.", "kept by no head", "by every head"],
  precision: ["Everything is kept. The brighter a word, the more finely it is stored.", "coarsest", "finest"],
};

export class Kept {
  constructor(id, failed) {
    this.id = id;
    this.failed = failed;
    this.element = h("div");
    this.reset();
  }

  reset() {
    this.loaded = false;
    this.element.replaceChildren(h("p", { class: "hint" }, "This is shown once the document is stored."));
  }

  async load() {
    if (this.loaded) return;
    this.loaded = true;
    this.element.replaceChildren(h("p", { class: "hint", role: "status" }, "Loading ..."));
    try {
      const [retention, heads] = await Promise.all([
        call("GET", `/v1/contexts/${this.id}/retention`), call("GET", `/v1/contexts/${this.id}/heads`)]);
      this.element.replaceChildren(...text(retention), ...map(heads));
    } catch (error) {
      this.reset();
      this.failed(error);
    }
  }
}

function text(retention) {
  const [what, least, most] = WORDS[retention.kind];
  const pieces = [];
  for (const [piece, share] of retention.tokens) {
    const level = Math.round(share * LEVELS);
    if (pieces.length && pieces.at(-1)[1] === level) pieces.at(-1)[0] += piece;
    else pieces.push([piece, level]);
  }
  return [
    h("p", {}, what),
    h("div", { class: "legend", "aria-hidden": "true" }, least, h("i"), most),
    h("div", { class: "document", tabindex: 0, role: "region", "aria-label": "The document's text, shaded" },
      pieces.map(([piece, level]) => h("span", { "--share": level / LEVELS, title: `${Math.round((100 * level) / LEVELS)}%` }, piece))),
  ];
}

function map(heads) {
  const most = Math.max(...heads.layers.flatMap((layer) => layer.heads.map((head) => head.bytes)), 1);
  const columns = heads.layers[0].heads.length;
  return [
    h("h3", {}, "Bytes and kept entries per layer and kv head"),
    h("div", { class: "map", tabindex: 0, role: "region", "aria-label": "Bytes per layer and head" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "layer"), Array.from({ length: columns }, (_, i) => h("th", { scope: "col" }, `head ${i}`)),
        h("th", { scope: "col" }, "stored"))),
      h("tbody", {}, heads.layers.map((layer) => h("tr", {}, h("th", { scope: "row" }, layer.layer),
        layer.heads.map((head) => h("td", { "--share": head.bytes / most, title: `${count(head.n_kept)} entries kept, ${megabytes(head.bytes)}` },
          `${(100 * head.keep_ratio).toFixed(0)}%`)),
        h("th", {}, megabytes(layer.stored_bytes))))))),
  ];
}
