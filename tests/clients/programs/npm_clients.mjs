// OpenAI's client for JavaScript and Vercel's `ai` against the frontend at the URL given; a stack where something is not
// right.
//
//     npm_clients.mjs URL

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const baseURL = process.argv[2];
const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0, timeout: 180_000 });
const Person = z.object({ name: z.string(), born: z.number().int() });
const Numbers = z.object({ a: z.number(), b: z.number() });
const ada = { name: "Ada", born: 1815 };
const numbers = { a: 6, b: 7 };
const call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>';
const multiply = zodFunction({ name: "multiply", parameters: Numbers, function: ({ a, b }) => String(a * b) });
const says = (content) => [{ role: "user", content }];
const held = { temperature: 0, max_tokens: 200 };

async function textOf(stream, piece) {
  let text = "";
  for await (const chunk of stream) text += piece(chunk) ?? "";
  return text;
}

// --- openai

async function aChatComesWholeAndStreamed() {
  const whole = await client.chat.completions.create({ model: "echo", messages: says("one, two") });
  assert.equal(whole.choices[0].message.content, "one, two");
  assert.equal(whole.choices[0].finish_reason, "stop");
  const chunks = await client.chat.completions.create({
    model: "echo", messages: says("one, two"), stream: true, stream_options: { include_usage: true },
  });
  let usage;
  const text = await textOf(chunks, (chunk) => {
    usage = chunk.usage ?? usage;
    return chunk.choices[0]?.delta.content;
  });
  assert.equal(text, "one, two");
  assert.deepEqual(usage, whole.usage && { ...whole.usage, prompt_tokens_details: usage.prompt_tokens_details });
}

async function callsComeAndTheirResultsGoBack() {
  const stream = client.chat.completions.stream({ model: "echo", messages: says(call), tools: [multiply] });
  const [choice] = (await stream.finalChatCompletion()).choices;
  assert.equal(choice.finish_reason, "tool_calls");
  assert.deepEqual(choice.message.tool_calls[0].function.parsed_arguments, numbers);
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({ model: "echo", messages: says(call), tools: [multiply], stream });
    assert.equal(await runner.finalContent(), "42");
  }
}

async function anAnswerIsParsedByASchema() {
  const format = { response_format: zodResponseFormat(Person, "person") };
  const said = await client.chat.completions.parse({ model: "echo", messages: says(JSON.stringify(ada)), ...format });
  assert.deepEqual(said.choices[0].message.parsed, ada);
  const asked = { model: "speaker", messages: says("Who was Ada Lovelace?"), ...held, ...format };
  Person.parse((await client.chat.completions.parse(asked)).choices[0].message.parsed);
}

async function aResponseComesWholeAndStreamedAndGoesOn() {
  const parameters = z.toJSONSchema(Numbers);
  const asked = { model: "echo", tools: [{ type: "function", name: "multiply", parameters, strict: false }] };
  const whole = await client.responses.create({ ...asked, input: call });
  const streamed = await client.responses.stream({ ...asked, input: call }).finalResponse();
  for (const response of [whole, streamed]) {
    const [made] = response.output.filter((item) => item.type === "function_call");
    assert.deepEqual(JSON.parse(made.arguments), numbers);
    const output = [{ type: "function_call_output", call_id: made.call_id, output: "42" }];
    const end = await client.responses.create({ ...asked, input: output, previous_response_id: response.id });
    assert.equal(end.output_text, "42");
  }
  const text = { format: zodTextFormat(Person, "person") };
  const parsed = await client.responses.parse({ model: "echo", input: JSON.stringify(ada), text });
  assert.deepEqual(parsed.output_parsed, ada);
}

async function textsAreEmbedded() {
  const input = ["a mill", "a river"];
  const usual = await client.embeddings.create({ model: "speaker", input, dimensions: 64 });
  const plain = await client.embeddings.create({ model: "speaker", input, dimensions: 64, encoding_format: "float" });
  assert.equal(usual.data.length, 2);
  usual.data.forEach(({ embedding }, index) => {
    assert.equal(embedding.length, 64);
    embedding.forEach((x, at) => assert.ok(Math.abs(x - plain.data[index].embedding[at]) < 1e-5));
  });
}

async function modelsAreListedAndErrorsAreItsOwn() {
  const listed = [];
  for await (const model of client.models.list()) listed.push(model.id);
  assert.deepEqual(listed.sort(), ["echo", "speaker"]);
  await assert.rejects(client.chat.completions.create({ model: "nobody", messages: says("x") }), OpenAI.NotFoundError);
  const hot = client.chat.completions.create({ model: "echo", messages: says("x"), temperature: 3 });
  await assert.rejects(hot, (wrong) => wrong instanceof OpenAI.BadRequestError && wrong.param === "temperature");
}

// --- Vercel's `ai`

const compatible = createOpenAICompatible({
  name: "headrace", baseURL, apiKey: "any", includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey: "any" });
const providers = {
  compatible: (name) => compatible(name),
  "openai's chat": (name) => openai.chat(name),
  "openai's responses": (name) => openai.responses(name),
};
const tools = {
  multiply: tool({ description: "Multiplies.", inputSchema: Numbers, execute: async ({ a, b }) => a * b }),
};

async function aTextIsGeneratedAndStreamed(model) {
  const whole = await generateText({ model: model("echo"), prompt: "one, two", system: "Be kind.", maxRetries: 0 });
  assert.equal(whole.text, "one, two");
  assert.equal(whole.finishReason, "stop");
  const streamed = streamText({ model: model("echo"), prompt: "one, two", maxRetries: 0 });
  assert.equal(await textOf(streamed.textStream, (piece) => piece), "one, two");
  for (const usage of [whole.usage, await streamed.usage]) {
    assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0, JSON.stringify(usage));
  }
}

async function thinkingComesApart(model, providerOptions) {
  const prompt = `<think>I count.</think>${call}`;
  const asked = { model: model("echo"), prompt, tools, stopWhen: stepCountIs(3), providerOptions };
  const whole = await generateText({ ...asked, maxRetries: 0 });
  const streamed = streamText({ ...asked, maxRetries: 0 });
  await streamed.consumeStream();
  assert.equal(whole.text, "42");
  assert.equal(await streamed.text, "42");
  for (const { messages } of [await whole.response, await streamed.response]) {
    const asking = [{ role: "user", content: "6 times 7?" }, ...messages, { role: "user", content: "And now?" }];
    const more = await generateText({ model: model("echo"), messages: asking, tools, maxRetries: 0, providerOptions });
    assert.equal(more.text, "And now?");
  }
  return [whole.steps[0].reasoningText, (await streamed.steps)[0].reasoningText];
}

async function toolsAreCalled(model) {
  const asked = { model: model("echo"), prompt: call, tools, stopWhen: stepCountIs(3), maxRetries: 0 };
  const whole = await generateText(asked);
  const streamed = streamText(asked);
  await streamed.consumeStream();
  for (const [text, steps] of [[whole.text, whole.steps], [await streamed.text, await streamed.steps]]) {
    assert.equal(text, "42");
    assert.deepEqual(steps[0].toolCalls.map(({ toolName, input }) => [toolName, input]), [["multiply", numbers]]);
    assert.equal(steps[0].finishReason, "tool-calls");
  }
  const forced = { model: model("speaker"), prompt: "6 times 7?", temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
  const [made] = (await generateText({ ...forced, tools, toolChoice: "required" })).toolCalls;
  Numbers.parse(made.input);
}

async function anObjectIsGeneratedAndStreamed(model) {
  const said = { model: model("echo"), prompt: JSON.stringify(ada), schema: Person, maxRetries: 0 };
  assert.deepEqual((await generateObject(said)).object, ada);
  const streamed = streamObject(said);
  let last;
  for await (const part of streamed.partialObjectStream) last = part;
  assert.deepEqual(last, ada);
  assert.deepEqual(await streamed.object, ada);
  const asked = { prompt: "Who was Ada?", schema: Person, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
  Person.parse((await generateObject({ model: model("speaker"), ...asked })).object);
}

async function textsAreEmbeddedByVercels(embeddingModel) {
  const model = embeddingModel("speaker");
  assert.equal((await embed({ model, value: "a mill", maxRetries: 0 })).embedding.length, 576);
  assert.equal((await embedMany({ model, values: ["a mill", "a river"], maxRetries: 0 })).embeddings.length, 2);
}

async function what(name, asking) {
  try {
    await asking();
  } catch (wrong) {
    console.error(`${name}:`);
    throw wrong;
  }
}

for (const one of [
  aChatComesWholeAndStreamed, callsComeAndTheirResultsGoBack, anAnswerIsParsedByASchema,
  aResponseComesWholeAndStreamedAndGoesOn, textsAreEmbedded, modelsAreListedAndErrorsAreItsOwn,
]) {
  await what(`openai: ${one.name}`, one);
}
for (const [name, model] of Object.entries(providers)) {
  for (const one of [aTextIsGeneratedAndStreamed, toolsAreCalled, anObjectIsGeneratedAndStreamed]) {
    await what(`ai, ${name}: ${one.name}`, () => one(model));
  }
  // OpenAI's own chats show no reasoning, and its responses show the summary, where one is asked for.
  const thought = { compatible: "I count.", "openai's responses": "" }[name];
  await what(`ai, ${name}: thinking`, async () => assert.deepEqual(await thinkingComesApart(model), [thought, thought]));
}
for (const store of [true, false]) {
  const asked = { openai: { reasoningSummary: "auto", forceReasoning: true, store } };  // it does not know our models
  await what(`ai, openai's responses: thinking as its summary, store ${store}`, async () =>
    assert.deepEqual(await thinkingComesApart(providers["openai's responses"], asked), ["I count.", "I count."]));
}
for (const model of [(name) => compatible.embeddingModel(name), (name) => openai.embeddingModel(name)]) {
  await what("ai: texts are embedded", () => textsAreEmbeddedByVercels(model));
}
