/* Says to those who cannot see them what figures show and what sliders, players and choices are called:
   JupyterLab drops the alternative text of an image, and its widgets have no names. And it counts the seconds
   of a cell that runs, as other notebook programs do, so that no cell looks as if it were stuck. JupyterLab loads
   this file as one of its extensions; webpack, which usually makes such a file, is not needed for so little. */
"use strict";
(window._JUPYTERLAB ??= {})["ddp-course"] = {
  init() {},
  get: async () => () => ({__esModule: true, default: {id: "ddp-course:names", autoStart: true, activate}}),
};

const BUTTONS = {play: "play", pause: "pause", stop: "stop", retweet: "play again and again"};
let groups = 0;

function activate(app) {
  let waiting = false;
  const soon = () => {
    if (!waiting) setTimeout(() => { waiting = false; nameAll(app); }, 300);
    waiting = true;
  };
  new MutationObserver(soon).observe(document.body, {childList: true, subtree: true, characterData: true});
  setInterval(() => [...app.shell.widgets("main")].forEach(countSeconds), 1000);
  if (window.innerWidth < 500) app.restored.then(() => makeRoom(app.shell));
}

// A phone has room for one thing: the list of files closes, and the strip on the right goes.
function makeRoom(shell) {
  shell.collapseLeft();
  if (shell.isSideTabBarVisible("right")) shell.toggleSideTabBarVisibility("right");
}

const queues = new WeakMap(); // of each notebook: its cells that have a star, in the order in which they got it

function countSeconds(panel) {
  const cells = [...panel.content?.widgets ?? []];
  const stars = cells.filter(cell => cell.inputArea?.promptNode.textContent === "[*]:"); // folded ones, too
  const waited = (queues.get(panel) ?? []).filter(cell => stars.includes(cell));
  const queue = [...waited, ...stars.filter(cell => !waited.includes(cell))];
  queues.set(panel, queue);
  const prompt = queue[0]?.promptNode; // the first one runs
  for (const other of panel.node.querySelectorAll("[data-seconds]")) {
    if (other !== prompt) delete other.dataset.seconds;
  }
  // The first second is that in which it is seen.
  if (prompt) prompt.dataset.seconds = 1 + Number(prompt.dataset.seconds ?? 0);
}

function nameAll(app) {
  for (const panel of app.shell.widgets("main")) {
    for (const cell of panel.content?.widgets ?? []) nameFigures(cell.outputArea);
  }
  for (const image of document.querySelectorAll("img.widget-image")) {
    const said = [...image.parentElement.querySelectorAll(":scope > .widget-html .widget-html-content")].pop();
    if (said) image.alt = said.textContent;
  }
  for (const row of document.querySelectorAll(".widget-inline-hbox")) nameSlider(row);
  for (const box of document.querySelectorAll(".widget-radio-box")) nameChoice(box);
  for (const icon of document.querySelectorAll(".widget-play button i")) {
    icon.parentElement.setAttribute("aria-label", BUTTONS[icon.className.replace("fa fa-", "")] ?? "play");
  }
}

function nameFigures(area) {
  area?.widgets.forEach((output, place) => {
    const image = output.node.querySelector(".jp-RenderedImage img");
    const text = area.model.get(place)?.metadata["image/png"]?.alt;
    if (image && text) image.alt = text;
  });
}

function nameSlider(row) {
  for (const handle of row.querySelectorAll(".noUi-handle")) {
    handle.setAttribute("aria-label", row.querySelector(":scope > .widget-label").textContent);
    handle.setAttribute("aria-valuetext", row.querySelector(".widget-readout").textContent);
  }
}

function nameChoice(box) {
  box.setAttribute("role", "radiogroup");
  box.setAttribute("aria-label", box.closest(".widget-vbox")?.querySelector(".widget-html-content").textContent);
  if (box.dataset.group) return;
  box.dataset.group = `choice-${++groups}`;
  for (const button of box.querySelectorAll("input")) button.name = box.dataset.group;
  // Arrows move the choice, and not to another cell.
  box.addEventListener("keydown", event => { if (event.key.startsWith("Arrow")) event.stopPropagation(); });
}
