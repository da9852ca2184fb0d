// A conversation about one document: several turns, streamed, to be stopped at any time.

import { stream } from "./api.js";
import { h, seconds } from "./dom.js";

export class Conversation {
  constructor(context, told) {
    this.context = context;
    this.told = told; // called when there is a new time to a first token
    this.turns = [];
    this.firstTokenMs = null;
    this.running = null;
    this.log = h("div", { class: "log", role: "log", "aria-live": "polite", "aria-label": "Answers" });
    this.input = h("textarea", { id: "question", rows: 2, placeholder: "Ask the document", "aria-label": "Question" });
    this.button = h("button", { type: "submit" }, "Ask");
    this.fresh = h("button", { type: "button", class: "quiet", onclick: () => this.restart() }, "New conversation");
    this.form = h("form", {}, this.input, h("div", { class: "row" }, this.button, this.fresh,
      h("span", { class: "hint" }, "Enter asks, Shift+Enter begins a line")));
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.running ? this.stop() : this.ask(); });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.form.requestSubmit(); }
    });
    this.element = h("div", {}, this.log, this.form);
    this.update(context);
  }

  update(context) {
    this.context = context;
    const raw = context.template === "raw";
    this.button.disabled = context.status !== "ready" || raw;
    this.input.disabled = this.button.disabled;
    if (raw) this.input.placeholder = "This document was stored as raw text: ask it over the API, with `prompt`";
  }

  restart() {
    this.stop();
    this.turns = [];
    this.log.replaceChildren();
    this.input.focus();
  }

  stop() { this.running?.abort(); }

  async ask() {
    const question = this.input.value.trim();
    if (!question) return;
    this.input.value = "";
    this.turns.push({ role: "user", content: question });
    const answer = h("div", { class: "turn" });
    const note = h("div", { class: "told" }, "waiting ...");
    this.log.append(h("div", { class: "turn user" }, question), answer, note);
    note.scrollIntoView({ block: "nearest" });
    this.running = new AbortController();
    this.button.textContent = "Stop";
    try {
      await this.receive(answer, note);
    } catch (error) {
      const stopped = error.name === "AbortError";
      note.textContent = stopped ? "stopped" : "";
      if (!stopped) this.log.append(h("div", { class: "turn error", role: "alert" }, error.message));
      if (!answer.textContent) this.turns.pop();
    } finally {
      if (answer.textContent) this.turns.push({ role: "assistant", content: answer.textContent });
      this.running = null;
      this.button.textContent = "Ask";
    }
  }

  async receive(answer, note) {
    const began = performance.now();
    let first = null, cache = "";
    const body = { messages: this.turns, max_tokens: 512, stream: true };
    const path = `/v1/contexts/${this.context.id}/queries`;
    for await (const [name, data] of stream("POST", path, { json: body, signal: this.running.signal })) {
      if (name === "open") cache = data.get("x-cache") ?? "";
      if (name === "error") throw new Error(data.detail);
      if (name === "token") {
        if (first === null) { first = performance.now() - began; note.textContent = ""; }
        answer.textContent += data.text;
      }
      if (name === "done") {
        const n = data.usage.completion_tokens;
        const speed = data.timings.decode_ms > 0 ? (n / data.timings.decode_ms) * 1000 : 0;
        note.textContent = [`first token after ${seconds(first ?? performance.now() - began)}`, `${speed.toFixed(0)} tokens/s`,
          `${data.usage.prompt_tokens_details.cached_tokens} tokens from the snapshot (${cache})`].join(", ");
        if (first !== null) { this.firstTokenMs = first; this.told(); }
      }
    }
  }
}
