// The page: documents on the left, the chosen one on the right, what works in the header.

import { call, key, stream } from "./api.js";
import { $, count, h, megabytes } from "./dom.js";
import { Detail } from "./detail.js";

const WAYS = [
  ["As the server does", {}],
  ["Everything, 8 times smaller", { codec: { name: "tc", ratio: 8 } }],
  ["Everything, 16 times smaller", { codec: { name: "tc", ratio: 16 } }],
  ["Everything, 32 times smaller", { codec: { name: "tc", ratio: 32 } }],
  ["A quarter of the entries, 4 bits", { policy: "kvzip", keep_ratio: 0.25, codec: "int4-hadamard" }],
  ["An eighth of the entries, 4 bits", { policy: "kvzip", keep_ratio: 0.125, codec: "int4-hadamard" }],
  ["A quarter, chosen fast (SnapKV)", { policy: "snapkv", keep_ratio: 0.25, codec: "int4-hadamard" }],
];
const STAGES = { queued: "waiting", prefill: "reading", score: "weighing", search: "searching", scored: "packing",
  tighten: "cutting", storing: "storing", stored: "storing" };
const BUSY = ["queued", "prefilling", "compressing", "storing"];
const known = new Map(); // id -> context
const progress = new Map(); // id -> {stage, share}
const detail = new Detail($("detail"), { deleted: forget, failed: tell });
let offline = false;

function tell(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) askForKey();
  offline = error.code === "offline";
  $("banner").textContent = error.message;
  $("banner").hidden = false;
  if (!offline) setTimeout(() => { if (!offline) $("banner").hidden = true; }, 8000);
}

function reached() {
  if (offline) $("banner").hidden = true;
  offline = false;
}

function askForKey() {
  if ($("key-dialog").open) return;
  $("key").value = key.get();
  $("key-dialog").showModal();
}

$("key-button").addEventListener("click", askForKey);
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue !== "save") return;
  key.set($("key").value.trim());
  known.clear();
  refresh();
});

async function refresh() {
  try {
    const listed = (await call("GET", "/v1/contexts?limit=200")).data;
    const ids = new Set(listed.map((context) => context.id));
    for (const id of known.keys()) if (!ids.has(id)) known.delete(id);
    for (const context of listed) known.set(context.id, context);
    reached();
    draw(listed);
    for (const context of listed) if (BUSY.includes(context.status)) follow(context.id);
    if (detail.id && known.has(detail.id)) detail.update(known.get(detail.id));
    else if (detail.id) detail.clear();
    else if (location.hash.slice(1) && known.has(location.hash.slice(1))) choose(location.hash.slice(1));
  } catch (error) { tell(error); }
}

function draw(listed) {
  const ready = listed.filter((context) => context.status === "ready");
  const sum = (name) => ready.reduce((total, context) => total + context.storage[name], 0);
  $("none").hidden = listed.length > 0;
  $("total").textContent = ready.length ? `${megabytes(sum("stored_bytes"))} for ${megabytes(sum("raw_bytes"))} of cache` : "";
  const focused = document.activeElement?.dataset?.id;
  $("contexts").replaceChildren(...listed.map((context) => h("li", {}, card(context))));
  if (focused) document.querySelector(`.card[data-id="${focused}"]`)?.focus();
}

function card(context) {
  const { storage, status } = context;
  const children = [h("b", {}, context.name || context.id)];
  if (status === "ready") {
    children.push(
      h("div", { class: "bars", "aria-hidden": "true" }, h("i"), h("i", { "--share": 1 / (storage.ratio || 1) })),
      h("small", {}, `${count(context.usage.total_tokens)} tokens, ${megabytes(storage.stored_bytes)}, ${storage.ratio.toFixed(1)}x smaller`));
  } else if (BUSY.includes(status)) {
    const { stage = "waiting", share } = progress.get(context.id) || {};
    children.push(h("progress", { max: 1, value: share, "aria-label": stage }), h("small", {}, stage));
  } else {
    children.push(h("small", {}, status === "expired" ? "expired" : `failed: ${context.error?.detail ?? ""}`));
  }
  return h("button", { type: "button", class: "card", "data-id": context.id, onclick: () => choose(context.id, true),
    "aria-current": String(context.id === detail.id) }, children);
}

function choose(id, byHand = false) {
  detail.show(known.get(id));
  if (byHand) $("detail").scrollIntoView({ block: "nearest" });
  history.replaceState(null, "", `#${id}`);
  draw([...known.values()]);
}

function forget(id) {
  known.delete(id);
  history.replaceState(null, "", location.pathname);
  draw([...known.values()]);
}

/** Follows a context's work until it ends. */
async function follow(id) {
  if (progress.has(id)) return;
  progress.set(id, { stage: "waiting" });
  try {
    for await (const [name, data] of stream("GET", `/v1/contexts/${id}/events`)) {
      if (!(name in STAGES)) continue;
      progress.set(id, { stage: STAGES[name], share: data.total && data.processed ? data.processed / data.total : undefined });
      if (known.has(id)) document.querySelector(`.card[data-id="${id}"]`)?.replaceWith(card(known.get(id)));
      if (detail.id === id) detail.working(progress.get(id));
    }
  } catch (error) {
    if (error.status !== 404) tell(error);
  } finally {
    progress.delete(id);
    refresh();
  }
}

async function upload(body) {
  $("send").disabled = true;
  try {
    const context = await call("POST", "/v1/contexts", body);
    known.set(context.id, context);
    $("upload").reset();
    showFile();
    choose(context.id);
    await refresh();
  } catch (error) { tell(error); } finally { $("send").disabled = false; }
}

function showFile() {
  const file = $("file").files[0];
  $("drop").querySelector("strong").textContent = file ? file.name : "Drop a document here";
}

$("upload").addEventListener("submit", (event) => {
  event.preventDefault();
  const compression = WAYS[Number($("how").value)][1];
  const options = { compression, ...($("name").value ? { name: $("name").value } : {}) };
  const file = $("file").files[0];
  if (file) {
    const form = new FormData();
    form.append("file", file);
    form.append("options", JSON.stringify(options));
    upload({ form });
  } else if ($("text").value.trim()) {
    const name = options.name ?? $("text").value.trim().slice(0, 40);
    upload({ json: { ...options, name, text: $("text").value } });
  } else {
    tell(new Error("Choose a file or paste some text first."));
  }
});
$("file").addEventListener("change", showFile);
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files.length) {
      $("file").files = event.dataTransfer.files;
      showFile();
    }
  });
}

async function fleet() {
  try {
    const [workers, queues] = await Promise.all([call("GET", "/v1/workers"), call("GET", "/v1/queues")]);
    const load = workers.data.reduce((sum, worker) => sum + worker.load, 0);
    const slots = workers.data.reduce((sum, worker) => sum + worker.slots, 0);
    const waiting = queues.data.reduce((sum, queue) => sum + queue.compressions, 0);
    const n = workers.data.length;
    $("fleet").textContent = n
      ? `${n} worker${n > 1 ? "s" : ""} (${[...new Set(workers.data.map((worker) => worker.device))].join(", ")}), ${load} of ${slots} answers, ${waiting} document${waiting === 1 ? "" : "s"} in work`
      : "No worker is running: uploads and questions wait";
  } catch (error) {
    $("fleet").textContent = "";
    if (error.code === "offline") tell(error);
  }
}

$("how").append(...WAYS.map(([label], index) => h("option", { value: index }, label)));
detail.clear();
refresh();
fleet();
setInterval(() => { if (!document.hidden) { fleet(); refresh(); } }, 4000);
