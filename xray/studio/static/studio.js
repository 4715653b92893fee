// Keys of buttons: <button data-key="1">; and the chat, whose replies are shown as text while they come.
"use strict";

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select");
  if (event.key === "Escape" && typing) typing.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  // A second key while a verdict is on its way would be about the same question.
  if (document.querySelector("form.htmx-request")) return;
  const button = document.querySelector(`[data-key="${CSS.escape(event.key.toLowerCase())}"]:not([disabled])`);
  if (!button) return;
  event.preventDefault();
  if (button.matches("textarea")) button.focus();
  else button.click();
});

// After a verdict the next question is read from its beginning; refusals are shown where the answer would be.
document.addEventListener("htmx:afterSwap", (event) => {
  event.detail.elt.querySelector("[data-focus]")?.focus({ preventScroll: false });
});
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.xhr.status >= 400) event.detail.shouldSwap = true;
});

const chat = document.getElementById("chat");
if (chat) {
  const talk = document.getElementById("talk"), stop = document.getElementById("stop");
  const asks = document.getElementById("asks"), messages = [];
  // Boxes of the last reply, which "Regenerate" removes.
  let running = null, shown = [];

  const show = (role, title, text) => {
    const box = document.createElement("div"), name = document.createElement("h3"), body = document.createElement("p");
    box.className = `said ${role}`;
    name.textContent = title;
    body.className = "text";
    body.textContent = text;
    box.append(name, body);
    talk.append(box);
    return body;
  };
  // The reasoning before an answer, folded.
  const folded = (body) => {
    const details = document.createElement("details"), summary = document.createElement("summary"), text = document.createElement("p");
    summary.textContent = "Reasoning";
    text.className = "text";
    details.append(summary, text);
    body.before(details);
    return text;
  };
  const written = (call) => `${call.function.name}(${call.function.arguments})`;

  // The call that has no result yet: a person gives it.
  const waiting = () => {
    const last = messages.findLastIndex((message) => message.role === "assistant");
    const answered = messages.slice(last + 1).filter((message) => message.role === "tool").length;
    return last < 0 ? undefined : (messages[last].tool_calls ?? [])[answered];
  };
  const ask = () => {
    const call = waiting();
    asks.textContent = call ? `Result of ${written(call)}; Enter sends it` : "Message; Enter sends it";
  };

  const answer = async () => {
    const body = show("assistant", "Model", "");
    shown = [body.parentElement];
    running = new AbortController();
    stop.disabled = false;
    let text = "", reasoning = "", calls = [], failed = null, rest = "", thoughts = null;
    const take = (line) => {
      const part = JSON.parse(line);
      text += part.text ?? "";
      reasoning += part.reasoning ?? "";
      if (part.reasoning) {
        thoughts ??= folded(body);
        thoughts.textContent = reasoning;
      }
      calls = part.calls ?? calls;
      failed = part.error ?? failed;
      body.textContent = text;
    };
    try {
      const system = chat.elements.system.value.trim();
      const sent = system ? [{ role: "system", content: system }, ...messages] : messages;
      const fields = { messages: JSON.stringify(sent) };
      for (const name of ["temperature", "tools"]) fields[name] = chat.elements[name].value;
      const reply = await fetch("/chat", {
        method: "POST",
        signal: running.signal,
        headers: { "x-csrf-token": chat.elements.csrf.value, "hx-request": "true" },
        body: new URLSearchParams(fields),
      });
      if (!reply.ok) {
        const page = new DOMParser().parseFromString(await reply.text(), "text/html");
        failed = page.body.textContent.trim();
      } else {
        const reader = reply.body.getReader(), decoder = new TextDecoder();
        for (let part; !(part = await reader.read()).done; ) {
          const lines = (rest + decoder.decode(part.value, { stream: true })).split("\n");
          rest = lines.pop();
          lines.forEach(take);
        }
      }
    } catch (error) {
      if (error.name !== "AbortError") failed = error.message;
    }
    if (failed) {
      body.textContent = text ? `${text}\n${failed}` : failed;
      body.classList.add("bad");
    } else {
      const thought = reasoning ? { reasoning_content: reasoning } : {};
      messages.push({ role: "assistant", content: text, ...thought, ...(calls.length ? { tool_calls: calls } : {}) });
      for (const call of calls) shown.push(show("assistant", "Model calls", written(call)).parentElement);
    }
    stop.disabled = true;
    ask();
  };

  chat.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = chat.elements.text.value.trim(), call = waiting();
    if (!text || !stop.disabled) return;
    chat.elements.text.value = "";
    if (call) messages.push({ role: "tool", tool_call_id: call.id, content: text });
    else messages.push({ role: "user", content: text });
    show("user", call ? `Result of ${call.function.name}` : "You", text);
    ask();
    if (!waiting()) answer();
  });
  chat.elements.text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); chat.requestSubmit(); }
  });
  stop.addEventListener("click", () => running?.abort());
  document.getElementById("again").addEventListener("click", () => {
    if (!stop.disabled || messages.at(-1)?.role !== "assistant") return;
    messages.pop();
    shown.forEach((box) => box.remove());
    answer();
  });
}
