// Chat with provenance, and the fleet's figures once a second. Paths are relative: any route prefix will do.
"use strict";

const element = (id) => document.getElementById(id);
const chat = element("chat"), prompt = element("prompt"), send = element("send"), tip = element("tip");
const hint = chat.querySelector(".empty");
let messages = [], model = "", running = null;

const SOURCES = {
  accepted: "drafted and accepted",
  correction: "the target's own: the next draft token was rejected",
  bonus: "the target's own, after a draft that stood in full",
  plain: "the target's own: nothing was drafted or verified",
  unknown: "this engine does not say how its tokens come about",
};

// -- chat ---------------------------------------------------------------------------------------------------

function article(role) {
  hint.remove();
  const box = document.createElement("article"), text = document.createElement("div");
  box.className = role;
  text.className = "text";
  box.append(text);
  chat.append(box);
  return text;
}

function addTokens(text, step) {
  for (const token of step.tokens) {
    if (!token.text) continue;
    const span = document.createElement("span");
    span.className = `token ${token.source}`;
    span.textContent = token.text;
    const sure = token.confidence === null ? "" : `, confidence ${token.confidence.toFixed(2)}`;
    const counts = step.drafted ? ` Step: ${step.drafted} drafted, ${step.verified} verified, ${step.accepted} accepted.` : "";
    span.dataset.tip = `${SOURCES[token.source]}${sure}.${counts}`;
    text.append(span);
  }
}

// An engine that does not say how its tokens came about: all its text as one token.
function unexplained(text) {
  return text ? { drafted: 0, verified: 0, accepted: 0, tokens: [{ text, source: "unknown", confidence: null }] } : null;
}

function addFacts(text, facts) {
  const line = document.createElement("div"), seconds = (performance.now() - facts.started) / 1000;
  line.className = "facts";
  const parts = [`${facts.tokens} tokens`, `${(facts.tokens / seconds).toFixed(1)} tokens/s`];
  if (facts.steps) parts.push(`τ ${(facts.decoded / facts.steps).toFixed(2)}`);
  if (facts.verified) parts.push(`${facts.accepted} of ${facts.verified} verified draft tokens accepted`);
  line.textContent = parts.join(" · ");
  text.parentElement.append(line);
}

function addError(text, message) {
  const line = document.createElement("div");
  line.className = "facts failed";
  line.textContent = message;
  text.parentElement.append(line);
}

function atBottom() {
  return chat.scrollHeight - chat.scrollTop - chat.clientHeight < 60;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// The API key, where the server wants one: asked for once, forgotten when the tab closes.
function identity() {
  const key = sessionStorage.getItem("api-key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function post(path, body) {
  const ask = () => fetch(path, {
    method: "POST",
    signal: running.signal,
    headers: { "Content-Type": "application/json", ...identity() },
    body: JSON.stringify(body),
  });
  const response = await ask();
  if (response.status !== 401) return response;
  const key = window.prompt("This server wants an API key:");
  if (!key) return response;
  sessionStorage.setItem("api-key", key.trim());
  return ask();
}

async function answer() {
  const text = article("assistant"), conversation = messages;  // another one may begin before the answer ends
  const facts = { started: performance.now(), tokens: 0, decoded: 0, steps: 0, verified: 0, accepted: 0 };
  running = new AbortController();
  send.textContent = "Stop";
  try {
    const response = await post("v1/chat/completions", {
      model, messages: conversation, stream: true, speculation_details: true,
      temperature: Number(element("temperature").value), max_tokens: Number(element("limit").value) || undefined,
    });
    if (!response.ok) throw new Error((await response.json()).error?.message ?? `HTTP ${response.status}`);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0], step = choice?.speculation ?? unexplained(choice?.delta?.content);
      if (!step) continue;
      const follow = atBottom();
      if (facts.tokens) { facts.steps += 1; facts.decoded += step.tokens.length; }
      facts.tokens += step.tokens.length;
      facts.verified += step.verified;
      facts.accepted += step.accepted;
      addTokens(text, step);
      if (follow) chat.scrollTop = chat.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") addError(text, error.message);
  } finally {
    running = null;
    send.textContent = "Send";
  }
  if (facts.tokens) addFacts(text, facts);
  if (text.textContent) conversation.push({ role: "assistant", content: text.textContent });
  else conversation.pop();  // a question without an answer is no part of what comes next
  chat.scrollTop = chat.scrollHeight;
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const content = prompt.value.trim();
  if (!content) return;
  prompt.value = "";
  resize();
  article("user").textContent = content;
  messages.push({ role: "user", content });
  answer();
});

function resize() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

prompt.addEventListener("input", resize);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) element("form").requestSubmit();
  }
});
element("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  chat.replaceChildren(hint);
  prompt.focus();
});
element("colours").addEventListener("change", (event) => {
  document.body.classList.toggle("plainly", !event.target.checked);
});
chat.addEventListener("mousemove", (event) => {
  const text = event.target.dataset?.tip;
  tip.style.opacity = text ? 1 : 0;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
});
chat.addEventListener("mouseleave", () => { tip.style.opacity = 0; });

// -- figures ------------------------------------------------------------------------------------------------

const samples = [], budgets = [], speeds = [];

function parse(page) {
  const values = {};
  for (const line of page.split("\n")) {
    const match = /^([a-z_:]+) (\S+)$/.exec(line);
    if (match) values[match[1]] = Number(match[2]);
  }
  return values;
}

function show(id, value, digits = 1) {
  element(id).textContent = Number.isFinite(value) ? value.toFixed(digits) : "–";
}

function draw(id, values) {
  const top = Math.max(...values, 1e-9), step = 100 / 59;
  element(id).setAttribute("points", values.map((v, i) => `${(60 - values.length + i) * step},${38 - (34 * v) / top}`).join(" "));
}

function keep(values, value) {
  values.push(Number.isFinite(value) ? value : 0);
  if (values.length > 60) values.shift();
}

function showFigures(now) {
  samples.push({ at: performance.now(), ...now });
  if (samples.length > 11) samples.shift();
  const last = samples.at(-2) ?? samples[0], old = samples[0], seconds = (samples.at(-1).at - last.at) / 1000;
  const grown = (name, from) => now[`dspark_${name}_total`] - from[`dspark_${name}_total`];
  const speed = seconds > 0 ? Math.max(0, grown("emitted_tokens", last) / seconds) : NaN;
  keep(budgets, now.dspark_draft_budget_tokens);
  keep(speeds, speed);
  draw("budgets", budgets);
  draw("speeds", speeds);
  show("budget", now.dspark_draft_budget_tokens);
  show("speed", speed, 0);
  show("tau", grown("decode_tokens", old) / grown("request_steps", old), 2);
  show("acceptance", grown("accepted_tokens", old) / grown("verified_tokens", old), 2);
  element("step").textContent = now.dspark_step_measured_ms ? `${now.dspark_step_measured_ms.toFixed(1)} ms` : "–";
  element("load").textContent = `${now.dspark_requests_running ?? "–"}, ${now.dspark_requests_waiting ?? "–"}`;
  element("kv").textContent = `${Math.round(100 * (now.dspark_kv_usage_ratio ?? 0))}%`;
}

async function look() {
  const state = element("state");
  try {
    const [page, health] = await Promise.all([
      fetch("metrics", { headers: identity() }).then((response) => response.text()),
      fetch("health").then((response) => response.json()),
    ]);
    showFigures(parse(page));
    model = health.model;
    element("model").textContent = model;
    element("replicas").textContent = `${health.replicas.ready} of ${health.replicas.expected}`;
    element("mode").textContent = health.speculation.mode;
    state.textContent = health.status;
    state.className = health.status;
  } catch {
    state.textContent = "no answer";
    state.className = "away";
  }
  setTimeout(look, 1000);
}

// `ui?ask=...` opens the page with a first question.
async function begin() {
  await look();
  const question = new URLSearchParams(location.search).get("ask");
  if (question) {
    prompt.value = question;
    element("form").requestSubmit();
  }
}

begin();
