// The chosen document: what it takes, and three tabs: ask it, see what was kept, use it from code.

import { call } from "./api.js";
import { Conversation } from "./ask.js";
import { copyButton, count, h, megabytes, seconds } from "./dom.js";
import { Kept } from "./kept.js";

const TABS = [["ask", "Ask"], ["kept", "What was kept"], ["code", "Use it from code"]];

export class Detail {
  constructor(root, { deleted, failed }) {
    this.root = root;
    this.deleted = deleted;
    this.failed = failed;
    this.id = null;
  }

  clear() {
    this.conversation?.stop();
    this.id = null;
    this.context = null;
    this.root.replaceChildren(h("p", { class: "hint" }, "Choose a document to ask it questions."));
  }

  show(context) {
    this.conversation?.stop();
    this.id = context.id;
    this.context = context;
    this.head = h("div", { class: "panel" });
    this.conversation = new Conversation(context, () => this.drawHead());
    this.kept = new Kept(context.id, this.failed);
    this.panels = { ask: this.conversation.element, kept: this.kept.element, code: h("div") };
    this.tabs = h("div", { role: "tablist", "aria-label": "The document" }, TABS.map(([name, label]) =>
      h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, onclick: () => this.open(name) }, label)));
    this.tabs.addEventListener("keydown", (event) => this.move(event));
    this.root.replaceChildren(this.head, this.tabs, ...TABS.map(([name]) => h("div", { class: "panel", role: "tabpanel",
      id: `panel-${name}`, "aria-labelledby": `tab-${name}` }, this.panels[name])));
    this.open("ask");
    this.update(context);
  }

  update(context) {
    const before = this.context.status;
    this.context = context;
    this.conversation.update(context);
    if (before !== context.status) this.kept.reset();
    this.drawHead();
    this.panels.code.replaceChildren(...snippets(context));
  }

  working({ stage, share }) {
    if (!this.bar) return;
    this.bar.replaceChildren(h("progress", { max: 1, value: share, "aria-label": stage }), h("p", { class: "hint" }, `${stage} ...`));
  }

  open(name) {
    for (const [each] of TABS) {
      const chosen = each === name;
      const tab = this.tabs.querySelector(`#tab-${each}`);
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
      this.root.querySelector(`#panel-${each}`).hidden = !chosen;
    }
    if (name === "kept" && this.context.status === "ready") this.kept.load();
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const tabs = [...this.tabs.children];
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  }

  drawHead() {
    const context = this.context;
    const remove = h("button", { type: "button", class: "danger", onclick: () => this.remove(remove) }, "Delete");
    this.bar = h("div");
    const children = [h("div", { class: "title" }, h("h2", {}, context.name || context.id), remove),
      h("p", { class: "row" }, h("code", {}, context.id), copyButton(() => context.id, "Copy id"))];
    if (context.status === "ready") children.push(this.stats());
    else if (context.error) children.push(h("p", { class: "turn error", role: "alert" }, context.error.detail));
    else children.push(this.bar, h("p", { class: "hint" }, "It can be asked as soon as it is stored."));
    const focused = this.head.contains(document.activeElement);
    if (!focused) this.head.replaceChildren(...children);
  }

  stats() {
    const { storage, fidelity, timings, usage, policy } = this.context;
    const first = this.conversation.firstTokenMs;
    const rows = [
      ["Tokens", count(usage.total_tokens), this.context.model],
      ["Cache in 16 bits", megabytes(storage.raw_bytes), "what a GPU would hold"],
      ["Stored", megabytes(storage.stored_bytes), `${storage.ratio.toFixed(1)} times smaller`],
      ["Kept", `${(100 * storage.kept_ratio).toFixed(storage.kept_ratio < 1 ? 1 : 0)}%`,
        `${policy.policy}, ${policy.codec}`],
      ["Fidelity", fidelity ? `${(100 * fidelity.top1_agreement).toFixed(1)}%` : "not measured",
        fidelity ? `same next token; KL ${fidelity.kl.toFixed(4)} nats` : "it was cut down later"],
      ["First token", first === null ? "-" : seconds(first),
        timings.prefill_ms ? `instead of ${seconds(timings.prefill_ms)} for reading it again` : "ask to see"],
    ];
    return h("dl", { class: "stats" }, rows.map(([name, value, note]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, note)))));
  }

  async remove(button) {
    if (button.textContent === "Delete") {
      button.textContent = "Delete for good";
      setTimeout(() => { button.textContent = "Delete"; }, 4000);
      return;
    }
    const id = this.id;
    try {
      await call("DELETE", `/v1/contexts/${id}`);
      this.clear();
      this.deleted(id);
    } catch (error) { this.failed(error); }
  }
}

function snippets(context) {
  const origin = location.origin;
  const curl = `curl ${origin}/v1/contexts/${context.id}/queries \\
  -H 'content-type: application/json' \\
  -d '{"question": "What is this about?", "stream": true}'`;
  const python = `import openai

client = openai.OpenAI(base_url="${origin}/v1", api_key="YOUR KEY, IF THE SERVER ASKS FOR ONE")
answer = client.chat.completions.create(
    model="${context.model}",
    messages=[{"role": "user", "content": "What is this about?"}],
    extra_body={"context": "${context.id}"},
)
print(answer.choices[0].message.content)
print(answer.usage.prompt_tokens_details.cached_tokens, "tokens were not read again")`;
  const shell = `precis ask ${context.id} "What is this about?"`;
  return [["curl", curl], ["openai for Python", python], ["command line", shell]].flatMap(([title, text]) =>
    [h("h3", {}, title), h("div", { class: "snippet" }, h("pre", {}, text), copyButton(() => text))]);
}
