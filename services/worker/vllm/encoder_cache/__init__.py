"""The connector of a vLLM worker that shares the embeddings of images with other engines, by the machine's kvbm."""
