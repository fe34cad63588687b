// The composer: text and images of the next message.

import { at, button, element, icon, say } from "./dom.js";

const LONGEST_SIDE = 2048;
const MOST_IMAGES = 16;
const touch = matchMedia("(hover: none) and (pointer: coarse)");

export class Composer {
  #images = [];
  #whyNoImages = null;

  // Calls `send(text, images)`, which returns why the message was not taken, or null; and `stop()`.
  constructor(send, stop) {
    at("form").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = at("prompt").value.trim();
      if (!(text || this.#images.length)) return;
      const why = send(text, this.#images);
      if (why === null) this.clear();
      else this.#tell(why);
    });
    at("prompt").addEventListener("keydown", (event) => {
      if (event.key === "PageUp" || event.key === "PageDown") {
        event.preventDefault();
        at("scroll").scrollBy({ top: (event.key === "PageUp" ? -0.85 : 0.85) * at("scroll").clientHeight });
      }
      // On-screen keyboards have no other key for a new line.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch.matches) return;
      event.preventDefault();
      at("form").requestSubmit();
    });
    at("prompt").addEventListener("input", () => this.#update());
    at("prompt").addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
    at("stop").addEventListener("click", stop);
    at("attach").addEventListener("click", () => (this.#whyNoImages ? this.#tell(this.#whyNoImages) : at("files").click()));
    at("files").addEventListener("change", async () => {
      await this.add([...at("files").files]);
      at("files").value = "";
    });
    for (const kind of ["dragover", "dragleave", "drop"]) {
      document.addEventListener(kind, (event) => {
        if (!event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault(); // otherwise the browser opens the file
        at("form").classList.toggle("is-target", kind === "dragover" && !this.#whyNoImages);
        if (kind === "drop") this.add([...event.dataTransfer.files]);
      });
    }
    this.#update();
  }

  clear() {
    at("prompt").value = "";
    this.#images = [];
    this.#drawImages();
    this.#tell("");
  }

  fill(text) {
    at("prompt").value = text;
    at("prompt").focus();
    this.#update();
  }

  // Says why images cannot be added; null: they can.
  set whyNoImages(reason) {
    this.#whyNoImages = reason;
    at("attach").setAttribute("aria-disabled", String(reason !== null));
    at("attach").title = reason ?? "Add images; they can be pasted and dropped too";
    this.#tell("");
  }

  set isRunning(isRunning) {
    const hadFocus = document.activeElement === at("send") || document.activeElement === at("stop");
    at("send").hidden = isRunning;
    at("stop").hidden = !isRunning;
    if (hadFocus) at("prompt").focus();
  }

  async add(files) {
    const problems = [];
    if (this.#whyNoImages) {
      problems.push(this.#whyNoImages);
    } else {
      for (const file of files) {
        if (this.#images.length === MOST_IMAGES) {
          problems.push(`A message has ${MOST_IMAGES} images at most.`);
          break;
        }
        try {
          this.#images.push(await asDataUrl(file));
        } catch {
          problems.push(`${file.name} is no image that the browser can read.`);
        }
      }
    }
    this.#drawImages();
    this.#tell(problems.join(" "));
    at("prompt").focus();
  }

  #tell(text) {
    at("note").textContent = text;
    if (text) say(text);
  }

  #update() {
    at("send").disabled = !at("prompt").value.trim() && !this.#images.length;
  }

  #drawImages() {
    at("images").hidden = !this.#images.length;
    at("images").replaceChildren(...this.#images.map((url, place) => {
      const remove = () => {
        this.#images.splice(place, 1);
        this.#drawImages();
        at("prompt").focus();
      };
      const away = button({ class: "icon", "aria-label": `Remove image ${place + 1}`, onclick: remove }, icon("close"));
      return element("div", { class: "thumb" }, element("img", { src: url, alt: `Image ${place + 1}` }), away);
    }));
    this.#update();
  }
}

// Scales photographs down: models use fewer pixels than cameras take, and bodies have a size limit.
async function asDataUrl(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(image.width, image.height));
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return file.type === "image/jpeg" ? canvas.toDataURL("image/jpeg", 0.92) : canvas.toDataURL("image/png");
}
