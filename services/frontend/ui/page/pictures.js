// Pictures in the chat, for models that make them: each preview as it comes, and then the picture.

import { ask, events } from "./connection.js";
import { make, write } from "./dom.js";

const PREVIEWS = 3;
const EVENT_LIMIT = 64 << 20;

/** Shows a picture below `place` while it is made; resolves once it is there. */
export async function showPicture(model, prompt, signal, place, meta, changed) {
  const began = performance.now();
  const picture = make("img", "picture");
  picture.alt = prompt;
  const response = await ask("v1/images/generations", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model, prompt, stream: true, partial_images: PREVIEWS }),
  });
  for await (const data of events(response, () => {}, EVENT_LIMIT)) {
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    if (!event.b64_json) continue;
    picture.src = `data:image/${event.output_format};base64,${event.b64_json}`;
    if (!picture.parentNode) place.append(picture);
    if (event.type === "image_generation.completed") {
      const seconds = (performance.now() - began) / 1000;
      write(meta, `${event.size}, ${event.usage.output_tokens} steps, seed ${event.seed}, ${seconds.toFixed(1)} s`);
    }
    changed();
  }
}
