/* Brings explorers and predictions to life: no kernel, no network, no library. */
"use strict";

function explore(place) {
  const {sliders, lines, tree} = window.explorers[place.id];
  const image = place.querySelector("img"), message = document.createElement("output");
  const inputs = sliders.map(slider => control(place, image, slider, redraw));
  image.after(message);
  image.loading = "eager"; // it changes out of sight as well
  function redraw() {
    let node = tree;
    for (const input of inputs) {
      input.max = node.length - 1; // how far one goes may depend on those before
      node = node[Number(input.value)];
      input.redescribe();
    }
    const [text, alternative, rows] = node;
    URL.revokeObjectURL(image.src);
    image.src = URL.createObjectURL(new Blob([rows.map(row => lines[row]).join("\n")], {type: "image/svg+xml"}));
    image.alt = alternative;
    message.textContent = text;
  }
  redraw();
}

function control(place, before, {name, labels, at}, redraw) {
  const label = document.createElement("label"), input = document.createElement("input");
  const shown = document.createElement("span");
  Object.assign(input, {type: "range", min: 0, max: labels.length - 1, step: 1});
  input.value = at;
  input.redescribe = () => {
    shown.textContent = labels[Number(input.value)];
    input.setAttribute("aria-valuetext", shown.textContent);
  };
  input.addEventListener("input", redraw);
  label.append(name + " ", input, " ", shown);
  place.insertBefore(label, before);
  return input;
}

function predict(question) {
  const number = question.dataset.number;
  const answers = [...question.querySelectorAll("label")].map(label => label.textContent.trim());
  const reveals = document.querySelectorAll(`.reveal[data-number="${number}"]`);
  question.addEventListener("change", event => {
    const chosen = Number(event.target.value);
    for (const line of reveals) {
      const verdict = chosen === Number(line.dataset.right) ? ", which is right" : "";
      const why = JSON.parse(line.dataset.why)[chosen] ?? "";
      line.textContent = `You guessed ${answers[chosen]}${verdict}. ${line.dataset.outcome} ${why}`.trimEnd();
    }
  });
}

document.querySelectorAll(".explorer").forEach(explore);
document.querySelectorAll(".prediction").forEach(predict);
