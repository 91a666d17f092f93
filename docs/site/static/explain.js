// What docs/explain.py does with a log, for lines that are pasted into First aid's box.
// messages.js, which conf.py makes from the same entries, has ENTRIES, SAYS_ERROR, MOST.
const COLOURS = /\x1b\[[0-9;?]*[ -/]*[@-~]/g;
const MOST_LINES = 5000;
for (const entry of ENTRIES) {
  entry.patterns = entry.patterns.map(([source, part, weight]) => ({
    regex: new RegExp(source), part, weight,
  }));
}

function findEntries(text) {
  const found = new Map();
  text.split(/[\r\n]+/).slice(0, MOST_LINES).forEach((line, number) => {
    line = line.replace(COLOURS, "").slice(0, 16384);
    let best = null;
    for (const entry of ENTRIES) {
      for (const { regex, part, weight } of entry.patterns) {
        const better = !best || entry.order < best.entry.order ||
          (entry.order === best.entry.order && weight > best.weight);
        if (better && line.includes(part) && regex.test(line)) {
          best = { entry, weight, line, number };
        }
      }
    }
    if (best && !found.has(best.entry)) {
      const says = line.includes("NCCL INFO") ? 2 : new RegExp(SAYS_ERROR).test(line) ? 0 : 1;
      best.order = Math.max(best.entry.order, says);
      found.set(best.entry, best);
    }
  });
  const all = [...found.values()];
  all.sort((a, b) => a.order - b.order || a.number - b.number);
  return all.slice(0, MOST);
}

function element(name, text, parent) {
  const made = document.createElement(name);
  made.textContent = text;
  parent.append(made);
  return made;
}

function showAnswers(box, answers) {
  answers.replaceChildren();
  if (!box.value.trim()) return;
  const found = findEntries(box.value);
  for (const { entry, line } of found) {
    element("p", line.trim().slice(0, 200), answers).className = "line";
    const answer = element("p", "", answers);
    entry.answer.split("`").forEach((words, index) => {
      element(index % 2 ? "code" : "span", words, answer);
    });
    element("a", "The whole entry", element("p", "", answers)).href = entry.link;
  }
  if (!found.length) {
    element("a", "Not known: what to send to support", answers).href =
      "#what-to-send-to-support";
  }
}

if (typeof document !== "undefined") {
  const box = document.querySelector("#explain textarea");
  const answers = document.querySelector("#explain output");
  box.closest("#explain").hidden = false;
  box.addEventListener("input", () => showAnswers(box, answers));
}
